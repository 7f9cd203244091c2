"""Tokens that choices have cost: absent where they are not estimated, and a share of what could have been."""

from __future__ import annotations

import pytest

from distillspec.serving.selection.base import SelectionParts
from distillspec.serving.selection.baselines import ByPromptLength, Drawn, EpsilonGreedy, Fixed
from distillspec.serving.selection.goodput import GoodputSelection
from distillspec.serving.selection.lbss import Lbss
from distillspec.serving.selection.losses import Losses, share_lost

from .steps import COSTS, LENGTH, TARGET, World, parts

CHANCES = {"a": {"x": 0.8}, "dear": {"x": 0.3}}
NAMES = ("a", "dear")


def test_sums_are_none_until_something_is_added() -> None:
    losses = Losses()
    losses.add(2.0)
    assert (losses.trials, losses.regret) == (2.0, None)
    losses.add(0.5, 3.0)
    assert (losses.trials, losses.regret) == (2.5, 3.0)


def test_the_share_is_of_what_would_have_been_written() -> None:
    assert share_lost(25.0, 75.0) == 0.25
    assert share_lost(300.0, 100.0) == 0.75
    assert share_lost(0.0, 0.0) == 0.0


@pytest.mark.parametrize("make", [Fixed, Drawn, ByPromptLength])
def test_a_selection_that_learns_nothing_estimates_nothing(make: type[Fixed | Drawn | ByPromptLength]) -> None:
    world = World(make(parts(NAMES)), CHANCES)
    world.serve("x")
    assert world.selection.losses == Losses(None, None)


def tokens_a_second(source: str) -> float:
    chance, drafted_s = CHANCES[source]["x"], COSTS.of_draft(source).loop_s(1, 0, LENGTH)
    return sum(chance**place for place in range(LENGTH + 1)) / (TARGET.seconds(0, 1 + LENGTH) + drafted_s)


def lbss(own: SelectionParts) -> Lbss:
    return Lbss(own, chunks=2, chunk=8, first=6)


@pytest.mark.parametrize("make", [lbss, EpsilonGreedy])
def test_losses_are_what_the_best_draft_would_have_written_in_the_same_seconds(make: type[EpsilonGreedy]) -> None:
    """The drafts' true tokens a second are known here, and the estimate comes near what was truly lost."""
    world = World(make(parts(NAMES)), CHANCES)
    tried = 0
    for _ in range(400):
        by = world.serve("x", 40)
        tried += by.get("dear", 0)
    seconds = tried / tokens_a_second("dear")
    truly = seconds * tokens_a_second("a") - tried
    losses = world.selection.losses
    assert losses.trials is not None
    assert losses.regret is not None
    assert 0.85 * truly < losses.regret < 1.15 * truly
    assert 0.8 * losses.regret < losses.trials <= losses.regret
    share = share_lost(losses.regret, world.tokens)
    assert share == pytest.approx(1 - world.tokens / world.seconds / tokens_a_second("a"), abs=0.03)


def test_goodput_estimates_the_cost_of_trials_alone() -> None:
    world = World(GoodputSelection(parts()), {"a": {"x": 0.7}, "b": {"x": 0.5}})
    for _ in range(100):
        world.serve("x")
    losses = world.selection.losses
    assert losses.regret is None
    assert losses.trials is not None
    assert 0 < share_lost(losses.trials, world.tokens) < 0.1
