"""Drafts with tables of other sizes than the target's in the engine: outputs are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.draft import load_pretrained
from distillspec.models.table_sizes import with_ids
from distillspec.models.tiny import tiny_model
from distillspec.serving import Engine, EngineSettings, SamplingParams

from .conftest import hf_greedy, prompts

FEWER = 250  # ids, below the 259 of the tiny tokenizer


@pytest.mark.parametrize("wider", [False, True], ids=["narrower", "wider"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_the_targets(target: LanguageModel, tmp_path: Path, wider: bool, temperature: float) -> None:
    assert target.tokenizer is not None
    tiny_model(FEWER, layers=2, seed=3).save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    if wider:
        serving = load_target(TargetConfig(path=str(tmp_path), dtype="float32", device="cpu"))
        draft = with_ids(initialise_draft(DraftConfig(layers=2), target), serving)
    else:
        serving, draft = target, load_pretrained(str(tmp_path), target)
    texts = [[token % FEWER for token in prompt] for prompt in prompts(4)]
    if not wider:
        texts[0][-1] = 258  # an id that the draft lacks
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5, ignore_eos=True)
    settings = EngineSettings(controller="fixed", speculation_length=3, proposer="draft_model", max_model_len=128)
    engine, plain = Engine(serving, draft, settings), Engine(serving, None, EngineSettings(max_model_len=128))
    found, wanted = ([list(output.token_ids) for output in one.generate(texts, params)] for one in (engine, plain))
    engine.close()
    plain.close()
    assert found == wanted
    assert temperature or found == [hf_greedy(serving, text, 24) for text in texts]
