"""Acceptance with a set probability, for benchmarks."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.decoding.synthetic import SyntheticAcceptance

from ..conftest import prompts


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_drafted_tokens_stand_as_often_as_asked(target: LanguageModel, draft: LanguageModel, alpha: float) -> None:
    sampler = SyntheticAcceptance(target.identity.vocab_size, target.device, alpha)
    settings = EngineSettings(max_slots=4, max_model_len=256, controller="fixed", speculation_length=3)
    engine = Engine(target, draft, settings, sampler=sampler)
    outputs = engine.generate(prompts(4), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    engine.check_integrity()
    engine.close()
    tried = sum(sum(output.stats.tried_per_position) for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    spread = 4 * (alpha * (1 - alpha) / tried) ** 0.5
    assert alpha - spread <= accepted / tried <= alpha + spread


def test_an_impossible_probability_is_refused_by_name(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"alpha=1\.5 must be in"):
        SyntheticAcceptance(target.identity.vocab_size, target.device, 1.5)
