"""How many new answers an update waits for."""

from __future__ import annotations

from distillspec.config import AdaptConfig
from distillspec.serving.online.training.patience import enough_answers, fewest_answers


def fewest(in_vain: int = 0, **adapt: object) -> int | None:
    return fewest_answers(AdaptConfig(**adapt), in_vain)  # type: ignore[arg-type]


def enough(in_vain: int = 0, **adapt: object) -> int | None:
    return enough_answers(AdaptConfig(**adapt), in_vain)  # type: ignore[arg-type]


def test_the_fewest_answers_are_those_of_the_first_trigger() -> None:
    assert fewest(every_requests=20, on_drift=False) == 20
    assert fewest(every_requests=2, on_drift=False, min_requests=16) == 16
    assert fewest(every_requests=256, every_s=60.0, on_drift=False) == 16
    assert fewest(every_requests=256) == 48  # drift cannot be seen before
    assert fewest(every_requests=None, on_drift=False) is None


def test_learning_that_brings_nothing_comes_less_often_from_the_second_time_on() -> None:
    waits = [fewest(vain, every_requests=20, on_drift=False) for vain in range(7)]
    assert waits == [20, 20, 40, 80, 160, 320, 320]


def test_a_drift_that_may_not_come_leaves_an_update_short_of_text() -> None:
    """Otherwise nine of ten answers go unlogged before the update that waits for them."""
    assert enough(every_requests=64) == 64 > (fewest(every_requests=64) or 0)
    assert enough(2, every_requests=32) == 64
    assert enough(every_requests=64, every_s=60.0) == 16
    assert enough(every_requests=None) == fewest(every_requests=None) == 48
    assert enough(every_requests=None, on_drift=False) is None
