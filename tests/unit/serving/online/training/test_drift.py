"""Drift of acceptance: short against long average, by domain and over all traffic."""

from __future__ import annotations

from distillspec.serving.online.training.drift import SETTLED, DriftDetector


def test_drift_is_a_fall_of_the_short_average() -> None:
    detector = DriftDetector(0.1)
    assert not any(detector.add("code", 10, 7) for _ in range(5 * SETTLED))
    fallen = [detector.add("chat", 10, 3) for _ in range(40)]
    assert any(fallen)  # the whole falls, though chat is new
    detector.restart()
    assert not any(detector.add("chat", 10, 3) for _ in range(100))
    assert not detector.add("chat", 0, 0)


def test_traffic_without_a_name_counts_once() -> None:
    named, nameless = DriftDetector(0.1), DriftDetector(0.1)
    for i in range(100):
        named.add("a", 10, i % 10)
        nameless.add("", 10, i % 10)
    assert nameless.averages()[""] == named.averages()["a"] == named.averages()[""]
