"""Collapses of drafts: seen in a few answers, not in texts that are hard, and over once tokens are accepted again."""

from __future__ import annotations

import numpy
import pytest

from distillspec.serving.selection.accepting import features
from distillspec.serving.selection.collapse_test import RETEST_TOKENS, CollapseTest

from .steps import row

KNOWN = features(row("1/0", domain="x"))
NONE = numpy.zeros_like(KNOWN)


def usually(chance: float) -> CollapseTest:
    """Return the watch of a draft that is usually accepted with this chance."""
    found, own = CollapseTest(), NONE.copy()
    own[0] = numpy.log(chance / (1 - chance))
    found.expects(NONE, own)
    return found


def answers_until_seen(test: CollapseTest, tried: int, accepted: int = 0, most: int = 40) -> int | None:
    return next((number for number in range(1, most) if test.saw(KNOWN, tried, accepted)), None)


@pytest.mark.parametrize("usual", [0.4, 0.7, 0.95])
@pytest.mark.parametrize("tried", [16, 64])
def test_a_collapse_is_seen_in_a_few_answers(usual: float, tried: int) -> None:
    found = answers_until_seen(usually(usual), tried)
    assert found is not None
    assert 3 <= found <= 6


def test_one_answer_is_never_enough() -> None:
    test, before = usually(0.7), (0, 0)
    for _ in range(100):
        assert not test.saw(KNOWN, 16, 0, before)
        before = before[0] + 16, 0
    assert not test.has_collapsed


def test_a_draft_of_which_little_was_expected_cannot_collapse() -> None:
    assert answers_until_seen(usually(0.15), 64) is None


@pytest.mark.parametrize(("usual", "spread"), [(0.7, 0.2), (0.5, 0.15), (0.4, 0.1)])
def test_answers_that_differ_do_not_look_like_a_collapse(usual: float, spread: float) -> None:
    """Their chances are spread around the usual one."""
    test, random = usually(usual), numpy.random.default_rng(1)
    for _ in range(3000):
        chance = float(numpy.clip(random.normal(usual, spread), 0.02, 0.98))
        assert not test.saw(KNOWN, 40, int(random.binomial(40, chance)))


def test_it_goes_by_what_was_known_before_the_first_bad_answer() -> None:
    """What is learnt meanwhile would make the bad answers look usual."""
    test, low = usually(0.7), NONE.copy()
    low[0] = -4.0
    seen = []
    for _ in range(3):
        seen.append(test.saw(KNOWN, 16, 0))
        test.expects(NONE, low)
    assert seen == [False, False, True]
    assert test.usual == pytest.approx(0.7)


def test_it_is_over_when_tokens_are_accepted_again_and_the_next_one_takes_more_answers() -> None:
    test = usually(0.7)
    counts = list[int | None]()
    for _ in range(4):
        counts.append(answers_until_seen(test, 32))
        assert test.has_collapsed
        assert not test.saw(KNOWN, RETEST_TOKENS, 1)
        assert test.has_collapsed
        assert not test.saw(KNOWN, RETEST_TOKENS, RETEST_TOKENS // 2)
        assert not test.has_collapsed
    assert counts == [3, 5, 10, 10]
