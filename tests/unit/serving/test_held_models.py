"""Models are prepared once, however often they are held, and given back as they were with the last release."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.slot_attention import IMPLEMENTATION
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.held_models import HeldModels

from .conftest import MakeEngine, prompts


def implementation(model: LanguageModel) -> str:
    return model.model.config._attn_implementation


def test_a_model_held_twice_stays_prepared_until_its_second_release(target: LanguageModel) -> None:
    before = implementation(target)
    held = HeldModels(pack_weights=False, compile=False)
    target.model.train()
    for _ in range(2):
        held.hold(target)
    held.release(target)
    assert held
    assert implementation(target) == IMPLEMENTATION
    assert not target.model.training
    held.release(target)
    assert not held
    assert implementation(target) == before
    assert target.model.training
    target.model.eval()


def test_releasing_all_gives_back_what_was_held_twice_and_may_be_repeated(
    target: LanguageModel, draft: LanguageModel
) -> None:
    before = implementation(target), implementation(draft)
    held = HeldModels(pack_weights=False, compile=False)
    for model in (target, target, draft):
        held.hold(model)
    for _ in range(2):
        held.release_all()
    assert (implementation(target), implementation(draft)) == before
    with pytest.raises(AssertionError, match="is not held"):
        held.release(draft)


def test_an_engine_may_take_turns_between_two_drafts_and_drop_a_swap(
    target: LanguageModel, draft: LanguageModel, truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (wanted,) = make_engine().generate([prompts()[1]], params)
    engine = make_engine(draft)
    engine.use_draft(truncated_draft, "other")
    assert engine.use_draft(draft) == draft.identity.version  # before the other was ever used
    (output,) = engine.generate([prompts()[1]], params)
    assert output.token_ids == wanted.token_ids
    assert output.stats.draft_versions == [draft.identity.version]
    assert output.stats.proposed > 0


def test_an_engine_that_refuses_its_proposer_gives_its_models_back(target: LanguageModel, draft: LanguageModel) -> None:
    before = implementation(target)
    for settings in ({"tree": "medusa"}, {"proposer": "suffix", "proposer_options": {"tokens": 1}}):
        with pytest.raises(ConfigError):
            Engine(target, draft, EngineSettings(**settings))
        assert implementation(target) == before
