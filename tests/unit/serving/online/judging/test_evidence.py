"""Lengths are chosen on other conversations than they are judged by."""

from __future__ import annotations

import numpy
import pytest

from distillspec.serving.online.judging.evidence import Costs, Evidence, Pair
from distillspec.serving.online.judging.score import Score

COSTS = Costs(draft=0.1, verify=0.05)  # 1.15 at length 1, .15 more for each further one


def pair(before: list[float], after: list[float], blocks: float = 40.0) -> Pair:
    """Return a conversation with so many tokens a block at lengths 1, 2, …"""
    first, second = (Score(tuple(blocks * n for n in each), (blocks,) * len(each), 1.0, 40) for each in (before, after))
    return Pair("t", "d", first, second)


def test_a_conversation_is_judged_at_the_lengths_that_were_best_before_it() -> None:
    """By the first conversation lengths 1 and 2 are the best, by two of them 2 and 2, by all 1 and 2."""
    middle = [1.6, 2.0]
    found = Evidence([pair([1.6, 1.7], [1.6, 1.9]), pair(middle, middle), pair([1.6, 1.7], [1.6, 1.7])], COSTS)
    assert found.lengths == (1, 2)
    before, after = found.goodput
    assert before == pytest.approx((1.6 + 1.6 + 1.7) / (1.15 + 1.15 + 1.3))
    assert after == pytest.approx((1.6 + 2.0 + 1.7) / (1.15 + 1.3 + 1.3))
    assert found.gains().mean() == pytest.approx(after / before - 1)


def test_equal_drafts_show_no_gain_where_one_has_lengths_that_are_the_same() -> None:
    """At length 1 both accept the same. The first draft accepts no second token. The second one's pay what they cost.

    Chosen on the conversations that it is judged by, the second draft's length would be 1 or the longest, whichever is
    lucky.
    """
    dice, gains = numpy.random.default_rng(0), []
    for _ in range(400):
        firsts = 1 + numpy.clip(0.6 + 0.1 * dice.standard_normal(24), 0.3, 0.9)
        further = 1.6 * 0.15 / 1.15 + 0.06 * dice.standard_normal(24)
        found = [pair([own] * 4, [own + n * more for n in range(4)]) for own, more in zip(firsts, further, strict=True)]
        gains.append(Evidence(found, COSTS).gains().mean())
    assert numpy.std(gains) > 0.004, "the second draft does run at other lengths"
    assert abs(numpy.mean(gains)) < 0.002
