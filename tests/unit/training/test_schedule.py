"""Progress of a run, its limits, and its learning rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.config import TrainConfig
from distillspec.training.schedule import Progress, evaluation_fits, fraction_done, learning_rate_factor, stopped_by

schedules = st.sampled_from(["cosine", "wsd", "constant"])
shares = st.floats(0, 1)


@given(schedules, shares, st.floats(0, 0.9), shares)
def test_the_factor_stays_in_its_bounds(schedule: str, fraction: float, warmup: float, decay: float) -> None:
    config = TrainConfig(max_steps=1, schedule=schedule, warmup_fraction=warmup, decay_fraction=decay)
    assert 0.01 - 1e-9 <= learning_rate_factor(fraction, config) <= 1 + 1e-9


@given(schedules, shares, shares)
def test_after_the_warm_up_it_never_rises(schedule: str, one: float, other: float) -> None:
    config = TrainConfig(max_steps=1, schedule=schedule, warmup_fraction=0.1, decay_fraction=0.3)
    early, late = sorted((0.1 + 0.9 * one, 0.1 + 0.9 * other))
    assert learning_rate_factor(early, config) >= learning_rate_factor(late, config) - 1e-12


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # At the start, half way through the warm-up, at its end, in the middle of the rest, and at the end.
        ("cosine", [0.01, 0.5, 1.0, 0.505, 0.01]),
        ("wsd", [0.01, 0.5, 1.0, 1.0, 0.01]),
        ("constant", [0.01, 0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_shapes_at_known_places(schedule: str, expected: list[float]) -> None:
    config = TrainConfig(max_steps=1, schedule=schedule, warmup_fraction=0.2, decay_fraction=0.25)
    got = [learning_rate_factor(fraction, config) for fraction in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert got == pytest.approx(expected)


def test_the_decay_of_wsd_is_one_minus_a_root() -> None:
    config = TrainConfig(max_steps=1, schedule="wsd", warmup_fraction=0.0, decay_fraction=0.4)
    assert learning_rate_factor(0.7, config) == pytest.approx(0.01 + 0.99 * (1 - 0.25**0.5))
    assert learning_rate_factor(0.599, config) == 1.0


def test_without_decay_wsd_is_constant() -> None:
    assert learning_rate_factor(1.0, TrainConfig(max_steps=1, schedule="wsd", decay_fraction=0.0)) == 1.0


@given(st.integers(0, 50), st.integers(0, 5000), st.floats(0, 500))
def test_a_run_is_as_far_as_its_nearest_limit_and_ends_there(step: int, tokens: int, seconds: float) -> None:
    config = TrainConfig(max_steps=20, max_tokens=1000, max_minutes=2.0)
    done = fraction_done(Progress(step, tokens, seconds), config)
    assert done == pytest.approx(min(1.0, max(step / 20, tokens / 1000, seconds / 120)))
    assert (stopped_by(Progress(step, tokens, seconds), config) is not None) == (done >= 1.0)


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        (Progress(20, 0, 0.0), "steps"),
        (Progress(0, 1000, 0.0), "tokens"),
        (Progress(0, 0, 120.0), "minutes"),
        (Progress(19, 999, 119.9), None),
    ],
)
def test_each_limit_has_its_name(progress: Progress, reason: str | None) -> None:
    assert stopped_by(progress, TrainConfig(max_steps=20, max_tokens=1000, max_minutes=2.0)) == reason


def test_limits_that_are_not_set_count_for_nothing() -> None:
    assert fraction_done(Progress(5, 10**9, 1e9), TrainConfig(max_steps=10)) == 0.5


def test_a_limit_in_minutes_leaves_room_for_the_last_evaluation() -> None:
    config = TrainConfig(max_minutes=1.0)
    assert stopped_by(Progress(seconds=50.1, evaluation=10.0), config) == "minutes"
    assert stopped_by(Progress(seconds=49.9, evaluation=10.0), config) is None
    assert fraction_done(Progress(seconds=25.0, evaluation=10.0), config) == 0.5
    assert stopped_by(Progress(seconds=29.9, evaluation=100.0), config) is None  # half of the run is training


def test_evaluations_keep_to_their_share_with_a_place_for_the_last() -> None:
    config = TrainConfig(max_minutes=1.0, eval_share=0.5)
    assert evaluation_fits(Progress(evaluating=10.0, evaluation=10.0), config)
    assert not evaluation_fits(Progress(evaluating=10.1, evaluation=10.0), config)
    assert evaluation_fits(Progress(evaluating=1e9, evaluation=1e9), TrainConfig(max_steps=1))


def test_the_rate_leaves_evaluations_out() -> None:
    assert Progress(tokens=300, seconds=40.0, evaluating=10.0).tokens_per_s == 10.0


def test_the_warm_up_begins_with_the_first_step() -> None:
    """An on-policy run writes text first, for a twentieth of its time here."""
    config = TrainConfig(max_steps=1, schedule="constant", warmup_fraction=0.04)
    found = [learning_rate_factor(fraction, config, began=0.05) for fraction in (0.05, 0.07, 0.09, 0.5)]
    assert found == pytest.approx([0.01, 0.5, 1.0, 1.0])


@given(st.sampled_from(["cosine", "wsd"]), st.floats(0, 0.9), shares, shares)
def test_the_rate_falls_from_the_end_of_a_late_warm_up(schedule: str, began: float, one: float, other: float) -> None:
    config = TrainConfig(max_steps=1, schedule=schedule, warmup_fraction=0.05, decay_fraction=0.3)
    begun = began + 0.05
    assert learning_rate_factor(begun, config, began) == pytest.approx(1.0, abs=0.01)
    assert learning_rate_factor(1.0, config, began) == pytest.approx(0.01)
    early, late = sorted((begun + (1 - begun) * one, begun + (1 - begun) * other))
    assert learning_rate_factor(early, config, began) >= learning_rate_factor(late, config, began) - 1e-12


def test_a_fall_does_not_begin_inside_the_warm_up() -> None:
    """With began=0.7 the warm-up ends at 0.8, where a third of the fall would be over."""
    config = TrainConfig(max_steps=1, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.3)
    assert learning_rate_factor(0.8, config, 0.7) == pytest.approx(1.0)
    assert learning_rate_factor(0.85, config, 0.7) == pytest.approx(0.01 + 0.99 * (1 - 0.25**0.5))
    assert learning_rate_factor(0.85, config) == pytest.approx(0.01 + 0.99 * (1 - 0.5**0.5))
