"""The n-gram model: shares by hand, bounds, and what stays in a full table."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.proposers.ngram_counts import FOLLOWING, MOST_SEEN, NgramCounts

ROOMY = 10_007


def taught(texts: list[list[int]], longest: int = 2, contexts: int = ROOMY) -> NgramCounts:
    counts = NgramCounts(longest, contexts)
    for text in texts:
        for place in range(1, len(text)):
            counts.learn(text[:place], text[place])
    return counts


def test_shares_are_witten_and_bells() -> None:
    """Behind 2: 3 twice, 4 once, so 2 kinds of 3 counts. Behind 1, 2: 3 twice, 1 kind of 2 counts."""
    counts = taught([[1, 2, 3], [1, 2, 3], [5, 2, 4]])
    short = {3: 2 / 5, 4: 1 / 5}
    assert counts.shares([7, 2]) == pytest.approx(short)
    longer = {3: short[3] / 3 + 2 / 3, 4: short[4] / 3}
    assert counts.shares([1, 2]) == pytest.approx(longer)
    assert counts.shares([9]) == counts.shares([]) == {}


def test_shares_leave_room_for_what_was_never_seen() -> None:
    counts = taught([[1, 2, 3, 1, 2, 4, 1, 2, 3]], longest=3)
    for text in ([1, 2], [3, 1, 2], [2]):
        assert 0 < sum(counts.shares(text).values()) < 1


def test_frequent_contexts_outlast_rare_ones_in_a_full_table() -> None:
    counts = taught([[1, 2]] * 9 + [[other, 3] for other in range(10, 17)], longest=1, contexts=1)
    assert counts.shares([1]) == pytest.approx({2: 2 / 3})  # seven others took a count each
    assert counts.shares([16]) == {}
    for other in range(20, 24):
        counts.learn([other], 5)
    assert counts.shares([1]) == {}
    assert counts.shares([23]) != {}


def test_frequent_tokens_outlast_rare_ones_behind_a_context() -> None:
    counts = taught([[1, 2]] * 5 + [[1, token] for token in range(10, 10 + FOLLOWING)], longest=1)
    assert max(counts.shares([1]), key=lambda token: counts.shares([1])[token]) == 2
    assert len(counts.shares([1])) <= FOLLOWING


def test_counts_do_not_overflow() -> None:
    counts = taught([[1, 2]] * (MOST_SEEN + 5), longest=1)
    assert counts.shares([1])[2] > 0.99


@pytest.mark.parametrize(("longest", "contexts", "named"), [(0, 5, "longest=0"), (2, 0, "contexts=0")])
def test_impossible_sizes_are_refused(longest: int, contexts: int, named: str) -> None:
    with pytest.raises(ConfigError, match=f"proposer_options.{named} must be at least 1"):
        NgramCounts(longest, contexts)


def test_a_context_whose_tokens_rivals_have_taken_says_nothing() -> None:
    """Four tokens seen once fill a row. A fifth takes a count off each of them, and none is left."""
    counts = NgramCounts(longest=1, contexts=10)
    for token in range(5):
        counts.learn([7], token)
    assert counts.shares([7]) == {}
    counts.learn([7], 3)
    assert counts.shares([7]) == {3: 0.5}
