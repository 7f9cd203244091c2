"""A draft whose acceptance collapses is told from one that was never good."""

from __future__ import annotations

import pytest

from distillspec.serving.proposers.draft_collapse import JUDGED_TOKENS, DraftCollapse


def block(collapse: DraftCollapse, accepted: int) -> bool:
    found = [collapse.saw(number < accepted) for number in range(JUDGED_TOKENS)]
    assert found[-1] is not None
    return found[-1]


@pytest.mark.parametrize(("usual", "collapsed"), [(0.5, True), (0.2, True), (0.1, False), (None, False)])
def test_it_is_a_collapse_only_where_an_evaluation_says_that_it_was_good(usual: float | None, collapsed: bool) -> None:
    assert block(DraftCollapse(usual), 3) == collapsed


def test_without_an_evaluation_the_best_tokens_so_far_say_it() -> None:
    collapse = DraftCollapse(None)
    assert [block(collapse, accepted) for accepted in (3, 60, 30, 3, 4)] == [False, False, False, True, False]


def test_a_collapse_is_seen_after_as_many_tokens_whenever_it_begins() -> None:
    collapse, good = DraftCollapse(None), JUDGED_TOKENS + JUDGED_TOKENS // 2
    found = [collapse.saw(number < good) for number in range(good + JUDGED_TOKENS)]
    assert found[: JUDGED_TOKENS - 1] == [None] * (JUDGED_TOKENS - 1)
    assert found[JUDGED_TOKENS - 1 :].count(True) == 4, "from the token on with which three of two hundred are left"
    assert found[-1] is True
    assert (collapse.rate, collapse.usual) == (0.0, 1.0)
    collapse.begin_anew()
    assert collapse.saw(False) is None
    assert block(collapse, 0), "it was good once"
