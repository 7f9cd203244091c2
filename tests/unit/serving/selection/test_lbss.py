"""SPIN's selection: explore in chunks, average, match, exploit."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.selection.lbss import Lbss

from .steps import World, parts, row

NAMES = ("a", "b", "c")


def observe(selection: Lbss, rewards: dict[str, dict[str, int]]) -> dict[str, str | None]:
    """Run one step: row → draft → tokens that it writes with it, in a second."""
    view = BatchView(tuple([row(name, NAMES) for name in rewards]))
    chosen = dict(selection.choose(view.rows))
    results = [
        RowResult(name, 0, 0, 0, 1 if source is None else rewards[name][source]) for name, source in chosen.items()
    ]
    plans = tuple([RowPlan(name) for name in rewards])
    selection.observe(StepResult(tuple(results), view, Plan(plans), 0, 0.0, 1.0, 1.0), chosen)
    return chosen


def test_it_explores_in_chunks_then_serves_two_to_the_kth_steps() -> None:
    selection = Lbss(parts(NAMES), chunks=3, chunk=2, first=2)
    rewards = {"1/0": {"a": 1, "b": 4, "c": 2}}
    seen = [observe(selection, rewards)["1/0"] for _ in range(6 + 4 + 6 + 8)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[4] == seen[5]
    exploited = {*seen[6:10], *seen[16:24]}
    assert len(exploited) == 1, "one draft while it exploits"
    assert (selection.epoch, selection.explores) == (4, True)
    if "b" in seen[:6]:
        assert exploited == {"b"}


def test_a_changed_draft_is_explored_again_at_once() -> None:
    selection = Lbss(parts(NAMES), chunks=9, chunk=1, first=2)
    rewards = {"1/0": {"a": 5, "b": 4, "c": 2}}
    while selection.epoch < 5 or selection.explores:
        observe(selection, rewards)
    rewards["1/0"]["c"] = 9
    selection.draft_changed(DraftChange("c"))
    assert (selection.epoch, selection.explores) == (2, True)
    seen = [observe(selection, rewards)["1/0"] for _ in range(9 + 4 + 9 + 8)]
    assert {"c"} == set(seen[-8:])


def test_the_matching_is_the_best_of_all_where_places_are_few() -> None:
    rewards = {
        "1/0": {"a": 9, "b": 8, "c": 1},
        "2/0": {"a": 9, "b": 2, "c": 1},
        "3/0": {"a": 5, "b": 5, "c": 4},
    }
    selection = Lbss(parts(NAMES), chunks=60, chunk=1, places=1, first=3)
    for _ in range(60):
        chosen = observe(selection, rewards)
        assert len({source for source in chosen.values() if source}) == sum(
            source is not None for source in chosen.values()
        )
    assert not selection.explores
    chosen = observe(selection, rewards)
    found = sum(rewards[name][source or ""] for name, source in chosen.items())
    best = max(
        sum(own[source] for own, source in zip(rewards.values(), order, strict=True)) for order in permutations(NAMES)
    )
    assert found == best


def test_rows_beyond_the_places_run_without_a_draft() -> None:
    selection = Lbss(parts(NAMES), chunks=2, chunk=1, places=1, first=3)
    rewards = {f"{n}/0": {"a": 2, "b": 2, "c": 2} for n in range(5)}
    for _ in range(6):
        assert sum(source is None for source in observe(selection, rewards).values()) == 2


def test_rows_that_come_while_it_exploits_get_the_draft_of_the_best_mean() -> None:
    selection = Lbss(parts(NAMES), chunks=30, chunk=1, first=4)
    for _ in range(31):
        observe(selection, {"1/0": {"a": 1, "b": 5, "c": 2}})
    assert observe(selection, {"1/0": {"a": 1, "b": 5, "c": 2}, "new/0": {"a": 1, "b": 1, "c": 1}})["new/0"] == "b"


def test_regret_on_stationary_answers_grows_ever_slower() -> None:
    """Each doubling of the steps adds about as much as the one before (O(log T)), not twice as much."""
    world, lost = World(Lbss(parts(), chunks=2, chunk=4, first=4), {"a": {"x": 0.8}, "b": {"x": 0.2}}), [0.0]
    for doubling in range(3, 9):
        for _ in range(2**doubling):
            by = world.serve("x", 40)
            lost.append(lost[-1] + by.get("b", 0))
    wrong = [lost[2**k - 8] for k in range(5, 10)]
    added = [later - sooner for sooner, later in pairwise(wrong)]
    assert max(added) < 4 * (min(added) + 40)
    assert lost[-1] / (40 * len(lost)) < 0.2


def test_the_draft_of_the_matching_reads_ahead_in_the_last_chunk_of_exploration() -> None:
    selection = Lbss(parts(NAMES), chunks=12, chunk=2, first=3)
    rewards = {f"{number}/0": {"a": 1, "b": 5, "c": 2} for number in range(3)}
    for _ in range(11 * 2):
        observe(selection, rewards)
    chosen = observe(selection, rewards)
    assert selection.explores
    assert selection.coming == {name: "b" for name, source in chosen.items() if source != "b"} != {}
    observe(selection, rewards)
    assert set(observe(selection, rewards).values()) == {"b"}
    assert selection.coming == {}, "matched rows stay"
    slow = Lbss(parts(NAMES), chunks=1, chunk=2, first=3, fast_switching=False)
    observe(slow, rewards)
    assert slow.coming == {}


def test_steps_without_rows_have_nothing_to_match() -> None:
    selection = Lbss(parts(NAMES), chunks=1, chunk=2, first=3)
    assert selection.choose([]) == selection.coming == {}


@pytest.mark.parametrize("option", ["chunks", "chunk", "places", "first"])
def test_impossible_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"selection_options\.{option}=-1"):
        Lbss(parts(), **{option: -1})


@pytest.mark.parametrize("explores", [True, False])
def test_places_may_differ_by_draft(explores: bool) -> None:
    selection = Lbss(parts(NAMES), chunks=50 if explores else 30, chunk=1, places={"a": 1, "b": 2}, first=6)
    rewards = {f"{number}/0": {"a": 9, "b": 8, "c": 1} for number in range(5)}
    seen = [list(observe(selection, rewards).values()) for _ in range(40)][30:]
    assert selection.explores == explores
    assert all(found.count("a") <= 1 and found.count("b") <= 2 for found in seen)
    assert all(None not in found for found in seen), "c serves all others"
    assert max(found.count("c") for found in seen) >= 2


def test_places_of_a_draft_that_there_is_not_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"selection_options\.places\.d is no draft; there are a, b, c"):
        Lbss(parts(NAMES), places={"d": 2})
    with pytest.raises(ConfigError, match=r"selection_options\.places=-1"):
        Lbss(parts(NAMES), places={"a": -1})
