"""Impossible sampling parameters and engine settings are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.errors import ConfigError
from distillspec.serving import EngineSettings, SamplingParams


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"min_p": 2}, "min_p=2"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens=20 is above max_tokens=10"),
        ({"n": 0}, "n=0"),
        ({"logprobs": 100}, "logprobs=100"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": 5e-324}, r"repetition_penalty=5e-324 must be between 0.01 and 100"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
        ({"logit_bias": {3: 1e300}}, r"logit_bias\[3\]=1e\+300"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3"),
        ({"stop": [""]}, "empty string"),
        ({"bad_words": [""]}, "empty word"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\]"),
        ({"seed": -1}, "seed=-1"),
        ({"speculation_length": -1}, "speculation_length=-1"),
    ],
)
def test_impossible_sampling_parameters_are_refused_by_name(parameter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**parameter)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_slots": 0}, "max_slots=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"cache_gib": 0}, "cache_gib=0"),
        ({"controller": "magic"}, "controller=magic"),
        ({"speculation_length": -1}, "speculation_length=-1"),
        ({"draft_confidence": 1.0}, "draft_confidence=1.0"),
        (
            {
                "verification": "target_initialised",
                "controller": "fixed",
                "tree": "given",
                "widths": [2],
                "proposer": "suffix",
            },
            "needs proposer=draft_model, not suffix",
        ),
        ({"verification": "loose"}, "verification=loose"),
        ({"verification": "target_initialised"}, "verification=target_initialised needs controller=fixed tree=given"),
    ],
)
def test_impossible_engine_settings_are_refused_by_name(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**setting)


def test_vllms_spellings_are_understood() -> None:
    params = SamplingParams(top_k=-1, stop="END")
    assert (params.top_k, params.stop) == (0, ("END",))
