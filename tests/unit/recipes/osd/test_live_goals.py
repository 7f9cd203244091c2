"""Goals of the live comparison are met, missed, or not answered, by figures that are known."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.recipes.osd.live_goals import GOALS, met


def ratio(median: float, low: float = 0.9, high: float = 1.2, **more: Any) -> dict[str, Any]:
    return {"median": median, "over_requests": {"mean": median, "low": low, "high": high}, **more}


def figures(shifted: dict[str, Any], windows: list[dict[str, Any] | None], **more: Any) -> dict[str, Any]:
    comparison = {"own_domain": None, "shifted": shifted, "windows": windows}
    return {"cpu": {}, "events": {}, "online_over_static": comparison, **more}


def promoted(since_shift_s: float | None) -> dict[str, Any]:
    return {"event": "verdict", "decision": "promoted", "since_shift_s": since_shift_s}


def test_the_ratio_after_the_shift_is_held_to_its_median_and_its_lower_end() -> None:
    assert met(figures(ratio(1.06, low=1.01), []))["median"]
    assert met(figures(ratio(1.06, low=1.01), []))["low"]
    missed = met(figures(ratio(1.05, low=1.0), []))
    assert (missed["median"], missed["low"], missed["over_none"]) == (False, False, None)


def test_a_window_with_an_update_may_be_slower() -> None:
    slow = ratio(0.9, high=0.95)
    assert met(figures(ratio(1.1), [None, {**slow, "updates": 1}])) | {"median": True} == {
        **dict.fromkeys(GOALS),
        "median": True,
        "low": False,
        "window_with_update": True,
    }
    assert met(figures(ratio(1.1), [{**slow, "updates": 0}]))["window"] is False
    assert met(figures(ratio(1.1), [{**ratio(0.8, high=0.89), "updates": 2}]))["window_with_update"] is False


@pytest.mark.parametrize(
    ("since", "in_time"), [([None], None), ([None, 250.0, 600.0], True), ([301.0], False), ([], None)]
)
def test_only_the_first_promotion_after_the_shift_counts(since: list[float | None], in_time: bool | None) -> None:
    events = {"online": [promoted(seconds) for seconds in since]}
    assert met(figures(ratio(1.1), [], events=events))["first_promotion_s"] is in_time


@pytest.mark.parametrize("work", ["judging", "logging"])
def test_shares_of_processor_time_are_held_to_their_goals(work: str) -> None:
    for share, is_met in ((GOALS[work], True), (GOALS[work] + 0.001, False)):
        cpu = {"online": {"server_s": 9.0, "trainer_s": 1.0, "shares": {work: share}}}
        assert met(figures(ratio(1.1), [], cpu=cpu))[work] is is_met
