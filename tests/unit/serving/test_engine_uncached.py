"""float64: what the engine writes with caches, drafts and batches is what plain uncached passes write."""

from __future__ import annotations

import pytest
import torch

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.sampling import policy_probs
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.decoding.noise import exponentials, hashed_ids, key_tensor, noise_key

from .conftest import prompts


@pytest.fixture(scope="module")
def double() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float64", device="cpu"))


def uncached(target: LanguageModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """The definition of a seeded request: argmax(p / E) from a whole pass for every token."""
    hashed = hashed_ids(torch.arange(target.identity.vocab_size))
    output: list[int] = []
    assert params.seed is not None
    with torch.no_grad():
        for position in range(params.max_tokens or 0):
            logits = target.logits(torch.tensor([prompt + output]))[0, -1]
            noise = exponentials(key_tensor([noise_key(params.seed, 0, position)]), hashed)
            output.append(int((policy_probs(logits[None], params.policy) / noise).argmax()))
    return output


def test_cached_equals_uncached(double: LanguageModel) -> None:
    asked = prompts()
    each_params = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=12, ignore_eos=True) for i in range(len(asked))
    ]
    wanted = [uncached(double, prompt, params) for prompt, params in zip(asked, each_params, strict=True)]
    draft = initialise_draft(DraftConfig(layers=3), double)
    draft.model.double()
    engine = Engine(
        double, draft, EngineSettings(max_slots=3, max_model_len=256, controller="fixed", speculation_length=4)
    )
    outputs = engine.generate(asked, each_params)
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(output.stats.accepted for output in outputs) > 0
