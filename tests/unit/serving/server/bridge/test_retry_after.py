"""The time after which a refused client should try again."""

from __future__ import annotations

from distillspec.serving.server.bridge.retry_after import LONGEST_S, RECENT, RetryAfterEstimator


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_is_estimated_from_recent_ends() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    estimator.begin()
    assert estimator.seconds_until(5) == 1, "nothing has ended yet"
    for _ in range(4):
        clock.now += 2.0
        estimator.ended(1)
    assert (estimator.seconds_until(1), estimator.seconds_until(3)) == (2, 6)
    clock.now += 8.0
    assert estimator.seconds_until(1) == 4, "it has become slower"
    estimator.ended(3)
    assert estimator.seconds_until(3) == 7, "16 s for 7 answers"
    assert estimator.seconds_until(10**6) == LONGEST_S


def test_the_estimate_forgets_idle_times_and_old_ends() -> None:
    clock = Clock()
    estimator = RetryAfterEstimator(clock)
    estimator.begin()
    clock.now += 1000.0
    estimator.begin()
    clock.now += 3.0
    estimator.ended(1)
    assert estimator.seconds_until(1) == 3
    for _ in range(RECENT):
        clock.now += 0.1
        estimator.ended(1)
    assert estimator.seconds_until(10) == 1
