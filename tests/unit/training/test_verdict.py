"""A run that learns nothing gets a warning with the reason. One that learns gets none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distillspec.config import LossConfig, SamplingConfig, TrainCommand
from distillspec.training.learning_curve import alphas_compare
from distillspec.training.verdict import nothing_learned

LEARNS = 0.2


def command(loss: str) -> TrainCommand:
    return TrainCommand(loss=LossConfig(name=loss))


def test_a_run_that_learns_is_left_alone() -> None:
    assert nothing_learned(command("jsd"), 0.001, LEARNS, {"train/alpha": 0.4}, 1000) is None


@pytest.mark.parametrize(
    ("loss", "before", "alpha", "last", "reason"),
    [
        ("jsd", 1e-5, 1e-5, {"train/alpha": 0.1}, "the loss jsd has next to no gradient"),
        ("tvd", 1e-5, 0.009, {}, "use the default loss, or loss=fkl"),  # above the untrained draft, and still no use
        ("fkl", 1e-5, 1e-5, {}, "1000 tokens are too few, or train.learning_rate=0.0015"),
        ("fkl", 0.01, 0.01, {"train/alpha": 0.3}, "training text is 0.300; that text is unlike"),
        ("fkl", 0.4, 0.4, {"train/alpha": 0.41}, "train.learning_rate=0.0015 is too high for a draft this good"),
        ("jsd", 1e-5, 1e-5, {"train/bad_steps": 3.0}, "3 steps were not finite; lower train.learning_rate=0.0015"),
    ],
)
def test_the_likely_reason_is_named(
    loss: str, before: float, alpha: float, last: dict[str, float], reason: str
) -> None:
    said = nothing_learned(command(loss), before, alpha, last, 1000)
    assert said is not None
    assert said.startswith(f"WARNING: nothing learned: held-out α {alpha:.5f}, untrained {before:.5f}.")
    assert reason in said


@pytest.mark.parametrize(
    "other",
    [
        {"sampling": SamplingConfig(temperature=0.0)},
        {"loss": LossConfig(name="fkl", select_fraction=0.4, reference="RUN")},
    ],
)
def test_acceptance_of_other_distributions_is_not_compared(other: dict[str, Any]) -> None:
    plain = command("fkl")
    assert alphas_compare(plain)
    changed = replace(plain, **other)
    assert not alphas_compare(changed)
    assert "unlike" not in str(nothing_learned(changed, 0.01, 0.01, {"train/alpha": 0.3}, 1000))
