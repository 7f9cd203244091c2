"""Settings of the demo fit its time, and are settings of `distill train`."""

from __future__ import annotations

import pytest

from distillspec.composition import compose
from distillspec.recipes.demo.__main__ import overrides


@pytest.mark.parametrize("minutes", [1.0, 15.0, 60.0])
@pytest.mark.parametrize("target", ["smollm2", "tiny"])
def test_the_demo_composes_and_keeps_to_its_time(minutes: float, target: str) -> None:
    config = compose("train", overrides(minutes, target))
    assert config.data.max_minutes + config.train.max_minutes == pytest.approx(0.65 * minutes)
    assert config.train.eval_max_prompts == config.data.eval_prompts // 3
    assert config.evaluation.speedup_prompts >= 6  # fewer give no verdict
    assert config.evaluation.speedup_prompts <= config.data.eval_prompts - config.train.eval_max_prompts
