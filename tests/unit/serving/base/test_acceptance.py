"""Trials: what verification tried, counted alike wherever acceptance is measured."""

from __future__ import annotations

import pytest

from distillspec.serving.base.acceptance import (
    AcceptanceCounter,
    RowResult,
    Trial,
    acceptance_rate,
    by_version,
    chain_trials,
    count_trials,
    ranked_of_source,
    trials_of,
)
from distillspec.serving.base.tree import ROOT, SiblingGroup, TokenTree


@pytest.mark.parametrize(
    ("accepted", "depth", "trials"), [(0, 0, 0), (0, 1, 1), (0, 4, 1), (2, 4, 3), (3, 4, 4), (4, 4, 4)]
)
def test_trees_and_results_count_the_same_trials(accepted: int, depth: int, trials: int) -> None:
    found = trials_of(TokenTree.chain([7] * depth), range(accepted), accepted + 1)
    assert count_trials(accepted, depth) == trials
    assert found == chain_trials(trials, accepted, "draft")
    assert found == RowResult.chain("a", depth, accepted, accepted + 1).trials
    counter = AcceptanceCounter()
    counter.add(found, accepted + 1)
    assert (counter.tried, counter.accepted, counter.emitted) == (trials, accepted, accepted + 1)


def test_an_answer_that_ends_inside_a_window_counts_its_own_tokens_alone() -> None:
    counter = AcceptanceCounter()
    counter.add(trials_of(TokenTree.chain([7] * 5), range(4), 2), 2)
    assert (counter.tried_at, counter.accepted_at, counter.rate) == ([1, 1], [1, 1], 1.0)


TREE = TokenTree(
    (5, 6, 7, 8),
    (SiblingGroup(ROOT, (0,), "lookup"), SiblingGroup(ROOT, (1, 2)), SiblingGroup(2, (3,), "lookup")),
)


@pytest.mark.parametrize(
    ("path", "trials"),
    [
        ((), [Trial(1, 0, "lookup", False), Trial(1, 1, "draft", False), Trial(1, 2, "draft", False)]),
        ((0,), [Trial(1, 0, "lookup", True)]),
        (
            (2,),
            [
                Trial(1, 0, "lookup", False),
                Trial(1, 1, "draft", False),
                Trial(1, 2, "draft", True),
                Trial(2, 0, "lookup", False),
            ],
        ),
    ],
)
def test_a_tree_says_what_was_tried_at_each_rank(path: tuple[int, ...], trials: list[Trial]) -> None:
    assert list(trials_of(TREE, path, len(path) + 1)) == trials


def test_a_depth_counts_once_and_sources_are_told_apart() -> None:
    counter, trials = AcceptanceCounter(), trials_of(TREE, (2,), 2)
    counter.add(trials, 2)
    assert (counter.tried_at, counter.accepted_at) == ([1, 1], [1, 0])
    parts = by_version(trials, {"draft": "v1"})
    assert [trial.rank for trial in parts["v1"]] == [1, 2]
    assert [trial.depth for trial in parts[""]] == [1, 2]
    assert by_version(trials, {}) == {"": trials}
    assert by_version(trials_of(TREE, (0,), 2), {"draft": "v1"}).keys() == {""}


def test_there_is_no_rate_before_any_trial() -> None:
    assert acceptance_rate(0, 0) is None
    assert acceptance_rate(1, 4) == 0.25


def test_alpha_is_that_of_the_first_siblings() -> None:
    """Three windows: the first is right, then its sibling, then none. A sibling's child is a first one again."""
    counter = AcceptanceCounter()
    counter.add([Trial(1, 0, "draft", True)])
    counter.add([Trial(1, 0, "draft", False), Trial(1, 1, "draft", True), Trial(2, 0, "draft", True)])
    counter.add([Trial(1, 0, "draft", False), Trial(1, 1, "draft", False)])
    assert (counter.tried_at, counter.accepted_at) == ([3, 1], [2, 1])
    assert (counter.accepted, counter.firsts, counter.rate) == (3, 2, 0.5)


def test_trials_of_a_source_have_their_ranks_among_its_own() -> None:
    trials = trials_of(TREE, (2,), 2)
    assert ranked_of_source(trials, "draft") == (Trial(1, 0, "draft", False), Trial(1, 1, "draft", True))
    assert ranked_of_source(trials, "lookup") == (Trial(1, 0, "lookup", False), Trial(2, 0, "lookup", False))


def test_counts_of_two_are_those_of_all_their_windows() -> None:
    windows = [
        [Trial(1, 0, "draft", True), Trial(2, 0, "draft", False), Trial(2, 1, "draft", True)],
        [Trial(1, 0, "draft", False)],
        [Trial(1, 0, "draft", True), Trial(2, 0, "draft", True), Trial(3, 0, "draft", False)],
    ]
    whole, first, second = AcceptanceCounter(), AcceptanceCounter(), AcceptanceCounter()
    for place, trials in enumerate(windows):
        whole.add(trials, emitted=place + 1)
        (first if place < 2 else second).add(trials, emitted=place + 1)
    first.merge(second)
    assert first == whole
    assert first.by_position == [2 / 3, 1.0, 0.0]
    second.merge(AcceptanceCounter())
    assert second.by_position == [1.0, 1.0, 0.0]
    assert AcceptanceCounter([2, 0], [1, 0]).by_position == [0.5], "nothing was tried behind"
