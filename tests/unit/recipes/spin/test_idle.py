"""Padding and idle shares are those of the steps that decode."""

from __future__ import annotations

import pytest

from distillspec.recipes.spin.idle import Idle, idle_table
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView


def step(*lengths: int, prefill_tokens: int = 0) -> StepResult:
    rows = tuple(RowResult.chain(str(place), length, 0, 1) for place, length in enumerate(lengths))
    return StepResult(rows, BatchView((), 0, 0), Plan(()), prefill_tokens, draft_s=1.0, target_s=2.0, total_s=4.0)


def test_windows_of_unlike_length_pad_and_each_model_waits_for_the_other() -> None:
    idle = Idle()
    idle.add(step(4, 0, 1))
    idle.add(step(0, 0, 0))
    idle.add(step(9, 0, prefill_tokens=5))
    idle.add(None)
    assert idle.shares() == {"padding": pytest.approx(1 - 11 / 18), "target_idle": 0.5, "draft_idle": 0.75}
    assert idle_table({"A": idle.shares()}, ["A"])[-1] == "| A | 39% | 50% | 75% |"


def test_nothing_was_run() -> None:
    assert Idle().shares()["padding"] == 0
