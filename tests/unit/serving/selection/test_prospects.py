"""Prospects of rows: by the trees that the controller would grow, or by chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest

from distillspec.serving.base.acceptance import Trial
from distillspec.serving.base.candidates import Candidates, candidates
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.rows import RowView
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.known import KnownTrees
from distillspec.serving.selection.accepting import features
from distillspec.serving.selection.answer import Answer
from distillspec.serving.selection.batch import NO_DRAFT, Prospect
from distillspec.serving.selection.by_name import with_selection
from distillspec.serving.selection.estimate import DraftsAcceptance, Tried
from distillspec.serving.selection.free_share import FreeShare
from distillspec.serving.selection.goodput import GoodputSelection
from distillspec.serving.selection.optimism import ENOUGH_TOKENS, Optimism
from distillspec.serving.selection.prospects import LEAST_LEFT, Prospects

from .steps import COSTS, parts, row

LEVELS = 3
TREES = KnownTrees(candidates((3,) * LEVELS, 20), numpy.tile([0.3, 0.1], (LEVELS, 1)))
NAMES = ("a", "b")


def made(trees: KnownTrees | None = TREES) -> Prospects:
    return around(DraftsAcceptance({}, LEVELS), trees)


def around(
    acceptance: DraftsAcceptance, trees: KnownTrees | None = TREES, optimism: Optimism | None = None
) -> Prospects:
    own = replace(parts(), fixed_length=None, most=LEVELS, trees=lambda: trees)
    found = Prospects(own, acceptance, FreeShare(()), optimism or Optimism(0))
    found.alone = True
    return found


def wide(limit: int = LEVELS, *, siblings: bool = True, names: Sequence[str] = NAMES) -> RowView:
    """Return a row whose drafts may draft so many levels."""
    view = row("1/0", names)
    options = [option._replace(limit=limit, wide=siblings) for option in view.options]
    return view._replace(**options[0]._asdict(), others=tuple(options[1:]))


def of(prospects: Prospects, view: RowView, chance: float = 0.5) -> Prospect:
    return prospects.of(view, NAMES, [chance, chance])


@pytest.mark.parametrize(("trees", "siblings"), [(None, True), (TREES, False)])
def test_chains_are_priced_where_no_trees_are_grown(trees: KnownTrees | None, siblings: bool) -> None:
    found = of(made(trees), wide(siblings=siblings))
    assert found.tokens == pytest.approx(numpy.tile([0.5, 0.75, 0.875], (2, 1)))
    assert found.able.all()
    assert found.left == LEAST_LEFT


def test_rows_that_share_passes_are_priced_by_chains() -> None:
    """Siblings make drafts alike: by trees one of several rows would hardly get the passes of a better draft."""
    prospects, view = made(), wide()
    tree = prospects.of(view, NAMES, [0.3, 0.75]).tokens[:, -1]
    prospects.alone = False
    found = prospects.of(view, NAMES, [0.3, 0.75])
    assert found.shapes is None
    chain = found.tokens[:, -1]
    assert chain == pytest.approx([sum(chance**depth for depth in (1, 2, 3)) for chance in (0.3, 0.75)])
    assert chain[0] / chain[1] < 0.7 * tree[0] / tree[1]


def test_trees_bring_more_than_chains_and_take_more_nodes() -> None:
    found, chain = of(made(), wide()), of(made(None), wide())
    assert (found.tokens > chain.tokens).all()
    assert found.shapes is not None
    nodes, reads = found.shapes
    assert (nodes > numpy.arange(1, LEVELS + 1)).all()
    assert (reads >= numpy.arange(1, LEVELS + 1)).all()


def test_levels_beyond_a_rows_limit_bring_nothing() -> None:
    short, whole = of(made(), wide(2)), of(made(), wide())
    assert (short.tokens[:, :2] == whole.tokens[:, :2]).all()
    assert (short.tokens[:, 2] == whole.tokens[:, 1]).all()
    assert short.shapes is not None
    assert whole.shapes is not None
    assert (short.shapes[..., 2] == whole.shapes[..., 1]).all()


def test_trees_get_smaller_where_a_token_is_worth_more() -> None:
    """What a node must bring is learnt from the last batch: many rows are priced higher than one."""
    prospects = made()
    before = of(prospects, wide())
    prospects.priced(prospects.batch([before] * 64, NAMES), numpy.zeros(64, dtype=int))
    after = of(prospects, wide())
    assert before.shapes is not None
    assert after.shapes is not None
    assert after.shapes[0, 0, -1] < before.shapes[0, 0, -1]


def test_another_draft_has_other_trees() -> None:
    acceptance = DraftsAcceptance({}, LEVELS)
    prospects = around(acceptance)
    acceptance.saw("a", [Trial(1, 0, "a", True), Trial(2, 0, "a", False)] * 200)
    before = of(prospects, wide())
    change = DraftChange("a")
    acceptance.changed(change)
    assert (of(prospects, wide()).tokens == before.tokens).all(), "trees are kept until the next batch"
    prospects.changed(change)
    assert of(prospects, wide()).tokens[0, -1] > before.tokens[0, -1]


@pytest.mark.parametrize(("trees", "best"), [(None, "dear"), (TREES, "a")])
def test_siblings_make_up_for_what_a_cheap_draft_misses(trees: KnownTrees | None, best: str) -> None:
    names = ("a", "dear")
    prospects = made(trees)
    own = prospects.of(wide(names=names), names, [0.25, 0.75])
    batch = prospects.batch([own], names)
    rates = batch.rates(numpy.array([NO_DRAFT]), 0, batch.rate(numpy.array([NO_DRAFT])))
    assert names[rates.index(max(rates))] == best


def test_drafts_without_trials_of_an_answer_may_be_estimated_optimistically() -> None:
    optimism, acceptance = Optimism(), DraftsAcceptance({}, LEVELS)
    prospects, view = around(acceptance, None, optimism), wide()
    answer = Answer("a", view.context_tokens, features(view), 0.5)
    answer.learnt["a"] = Tried(30, 15, answer.features)
    expected = prospects.expected(view, NAMES, answer).tokens[:, 0]
    assert expected == pytest.approx([0.5, 0.5])
    optimistic = prospects.optimistic(view, NAMES, answer).tokens[:, 0]
    assert optimistic[0] == expected[0], "what it has tried it knows"
    assert 0.6 < optimistic[1] < 0.8, "as it may be"
    optimism.collapsed("a", 0.9)
    answer.prospect = None
    assert prospects.optimistic(view, NAMES, answer).tokens[1, 0] == pytest.approx(0.9)
    optimism.saw("b", answer.kind, ENOUGH_TOKENS)
    assert prospects.optimistic(view, NAMES, answer).tokens[1, 0] == pytest.approx(0.9), "until the next review"
    answer.prospect = None
    assert (prospects.optimistic(view, NAMES, answer).tokens[:, 0] == expected).all()


@pytest.mark.parametrize("trees", [None, TREES.nodes])
def test_a_selection_knows_the_trees_of_the_controller_inside(trees: Candidates | None) -> None:
    selection = with_selection(GoodputController(LEVELS, COSTS, trees=trees), "goodput", NAMES).selection
    assert isinstance(selection, GoodputSelection)
    known = selection.parts.trees()
    assert (None if known is None else known.nodes) is trees
