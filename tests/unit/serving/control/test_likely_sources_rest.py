"""Rests of sources with likely nodes: earned by what they bring, ended by time."""

from __future__ import annotations

import pytest

from distillspec.serving.control.likely_sources_rest import LEAST_GAIN, MOST_REST_STEPS, REST_STEPS, LikelySourcesRest


def weighed(rest: LikelySourcesRest, gain: float) -> int:
    """Weigh a gain until the sources rest. Return the plans that it took."""
    return next(plan for plan in range(1, 1000) if not rest.weigh(gain))


def test_sources_that_bring_nothing_rest_longer_each_time() -> None:
    rest, waits = LikelySourcesRest(), list[int]()
    for _ in range(6):
        weighed(rest, 0.0)
        waits.append(next(step for step in range(10_000) if not rest.rests or rest.step()))
    assert waits == [REST_STEPS, 2 * REST_STEPS, 4 * REST_STEPS, 8 * REST_STEPS, MOST_REST_STEPS, MOST_REST_STEPS]


@pytest.mark.parametrize(
    ("share", "gain", "rests"), [(0.0, 1.1 * LEAST_GAIN, False), (0.1, 1.1 * LEAST_GAIN, True), (0.1, 0.11, False)]
)
def test_a_gain_is_weighed_against_the_measured_share(share: float, gain: float, rests: bool) -> None:
    rest = LikelySourcesRest()
    rest.planned(share)
    rest.took(2 * share, 1.0)
    assert any(not rest.weigh(gain) for _ in range(500)) is rests


def test_a_first_share_starts_the_gain_anew() -> None:
    """A gain that was weighed before any cost was known would end in a rest at the first dear step."""
    rest = LikelySourcesRest()
    assert all(rest.weigh(0.021) for _ in range(400))
    rest.planned(0.04)
    rest.took(0.04, 1.0)
    assert rest.weigh(0.03), "twice the share is where it starts"


@pytest.mark.parametrize(("likely", "others", "rests"), [(1.9, 2.0, True), (2.0, 2.0, False), (1.9, 1.9, False)])
def test_a_promise_counts_by_what_such_steps_have_written(likely: float, others: float, rests: bool) -> None:
    """A gain of .05 is promised. Steps with likely nodes write 5 % less than expected, as the others do or not."""
    rest = LikelySourcesRest()
    for _ in range(1000):
        rest.wrote(2.0, likely, likely=True)
        rest.wrote(2.0, others, likely=False)
    assert any(not rest.weigh(0.05) for _ in range(400)) is rests


def test_what_is_more_outside_of_passes_than_at_rest_counts() -> None:
    """Planning takes 2 % of a step, and growing, judging and learning take more than at rest: 9 % in all."""
    rest = LikelySourcesRest()
    for _ in range(50):
        rest.planned(0.02)
        rest.took(0.12, 1.0)
    assert rest.share == pytest.approx(0.02), "not known before a rest"
    for _ in range(50):
        rest.rested(0.03)
    assert rest.share == pytest.approx(0.09)


def test_a_change_ends_a_rest() -> None:
    rest = LikelySourcesRest()
    weighed(rest, 0.0)
    rest.drop()
    assert not rest.rests
