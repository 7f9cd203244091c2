"""Calibration: what was accepted of what was expected, by sequence and over all of them."""

from __future__ import annotations

import pytest

from distillspec.serving.proposers.calibration import LEAST_SHARE, PRIOR_SHARE, PRIOR_TOKENS, STRENGTH, Calibration


def test_before_anything_was_seen_the_prior_is_taken() -> None:
    assert Calibration().share("a", True) == pytest.approx(PRIOR_SHARE)


def test_a_sequence_is_judged_by_its_own_and_by_all_of_its_group() -> None:
    found = Calibration()
    for _ in range(100):
        found.saw("often", True, 0.8, 1)
        found.saw("never", True, 0.8, 0)
    pooled = (100 + PRIOR_TOKENS * PRIOR_SHARE) / (160 + PRIOR_TOKENS)
    assert found.share("new", True) == pytest.approx(pooled, abs=0.02), "what is old counts less"
    assert found.share("often", True) > 1.1
    assert found.share("never", True) == pytest.approx(STRENGTH * pooled / (80 + STRENGTH), abs=0.01)
    assert found.share("new", False) == pytest.approx(PRIOR_SHARE), "another group"


def test_a_finished_sequence_is_forgotten_and_its_group_is_not() -> None:
    found = Calibration()
    for _ in range(50):
        found.saw("a", True, 0.5, 0)
    before = found.share("b", True)
    found.forget("a")
    assert found.share("a", True) == found.share("b", True) == before < 0.2


def test_what_is_never_accepted_is_still_tried_where_it_is_sure() -> None:
    found = Calibration()
    for _ in range(10_000):
        found.saw("a", True, 0.5, 0)
    assert found.share("b", True) == LEAST_SHARE
