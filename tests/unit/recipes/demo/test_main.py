"""Settings of the demo fit its time, and are settings of `distill train`."""

from __future__ import annotations

import itertools
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest

from distillspec.composition import compose
from distillspec.recipes.demo import __main__ as demo
from distillspec.recipes.demo.__main__ import overrides


@pytest.mark.parametrize("minutes", [1.0, 15.0, 60.0])
@pytest.mark.parametrize("target", ["smollm2", "tiny"])
def test_the_demo_composes_and_keeps_to_its_time(minutes: float, target: str) -> None:
    config = compose("train", overrides(minutes, target))
    assert config.data.max_minutes + config.train.max_minutes == pytest.approx(0.65 * minutes)
    assert config.train.eval_max_prompts == config.data.eval_prompts // 3
    assert config.evaluation.speedup_prompts >= 6  # fewer give no verdict
    assert config.evaluation.speedup_prompts <= config.data.eval_prompts - config.train.eval_max_prompts


def test_demos_of_the_same_second_have_a_folder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    looks = itertools.count()
    clock = SimpleNamespace(now=lambda: datetime(2026, 12, 1, 10, 20, 30, next(looks)))
    monkeypatch.setattr(demo, "datetime", clock)
    monkeypatch.setattr(demo, "distill", lambda words: commands.append(words) or 1)
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert [demo.main(), demo.main()] == [1, 1]
    assert len({words[-1] for words in commands}) == 2
