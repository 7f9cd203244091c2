"""Drafts of a pool that cannot be used are refused by name at the start, and the others serve."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.models.memory import token_bytes
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.proposers.base import HasMembers
from distillspec.serving.proposers.draft_model import DraftModel

from .conftest import MakeEngine, plain_answers, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
GIB = 2**30
LENGTH, SHORT = 1000, 40  # tokens of a text, and those that a draft of a short context reads


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def other_ids(draft: LanguageModel) -> LanguageModel:
    return replace(draft, name="other", identity=replace(draft.identity, vocab_size=100))


def test_a_draft_of_other_ids_is_refused_by_name(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        engine = make_engine({"bad": other_ids(draft), "good": draft})
    (line,) = told(caplog)
    assert line.startswith("the draft bad is refused, and the others serve: draft other reads")
    assert list(engine.drafts) == ["good"]
    (output,) = engine.generate(prompts(1), GREEDY)
    assert output.token_ids == plain_answers(target, prompts(1), [GREEDY])[0]
    assert "good" in output.stats.sources


def test_where_all_are_refused_the_start_is_too(draft: LanguageModel, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"no draft can be used: a: draft other reads .*; b: draft other reads"):
        make_engine({"a": other_ids(draft), "b": other_ids(draft)})
    with pytest.raises(ConfigError, match="draft other reads"):
        make_engine(other_ids(draft))


def test_a_draft_whose_cache_does_not_fit_is_refused_by_name(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    whole = replace(initialise_draft(DraftConfig(layers=4), target), name="whole")
    room = 1.1 * LENGTH * token_bytes([target, draft]) / GIB
    settings = {"cache_gib": room, "max_model_len": LENGTH, "max_slots": 1}
    with caplog.at_level(logging.ERROR):
        engine = make_engine({"half": draft, "whole": whole}, **settings)
    assert list(engine.drafts) == ["half"]
    (line,) = told(caplog)
    assert line.startswith("the draft whole is refused, and the others serve: one sequence of max_model_len=1000 needs")
    (output,) = engine.generate(prompts(1), GREEDY)
    assert "half" in output.stats.sources
    with pytest.raises(ConfigError, match="one sequence of max_model_len"):
        make_engine({"half": draft}, **{**settings, "cache_gib": room / 3})


def test_a_draft_that_there_is_no_memory_to_load_is_refused_by_name(
    target: LanguageModel,
    draft: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distillspec.serving import draft_loading

    for name in ("large", "half"):
        save_draft(draft, tmp_path / name, target)
    load = draft_loading.load_draft

    def loading(path: str | Path, own: LanguageModel, device: torch.device | None) -> LanguageModel:
        if Path(path).name == "large":
            raise MemoryError
        return load(path, own)

    monkeypatch.setattr(draft_loading, "load_draft", loading)
    with caplog.at_level(logging.ERROR):
        found = draft_loading.load_drafts([tmp_path / "large", tmp_path / "half"], target)
    assert isinstance(found, dict)
    assert list(found) == ["half"]
    assert told(caplog) == [
        "the draft large is refused, and the others serve: large does not fit into what is left of cpu's memory"
    ]


def short(target: LanguageModel) -> LanguageModel:
    """Return a draft that reads `SHORT` tokens."""
    made = initialise_draft(DraftConfig(layers=2), target)
    made.model.config.max_position_embeddings = SHORT
    return made


def drafts_of(engine: Engine) -> dict[str, DraftModel]:
    proposer: Any = engine.proposer
    members = proposer.proposers if isinstance(proposer, HasMembers) else {"draft": proposer}
    return {name: own for name, own in members.items() if isinstance(own, DraftModel)}


@pytest.mark.parametrize("pooled", [True, False])
def test_a_draft_of_a_shorter_context_drafts_for_texts_up_to_it(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, pooled: bool, tmp_path: Path
) -> None:
    drafts = {"short": short(target), "half": draft} if pooled else short(target)
    engine = make_engine(drafts, max_model_len=None, max_slots=2, selection="fixed", speculation_length=3)
    assert engine.max_model_len == target.longest_text
    asked = [prompts()[0], prompts()[3]]  # 3 tokens, and 24: the one ends within the context, the other beyond it
    wanted = plain_answers(target, asked, [GREEDY] * 2)
    for number, prompt in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), GREEDY))
    done, read, (name, *_) = {}, 0, drafts_of(engine)
    while engine.has_work:
        running = list(engine.sequences.running)
        done.update({output.request_id: output for output in engine.step().finished})
        unfinished = [own.id for own in running if own.finish_reason is None]
        read = max([read, *(drafts_of(engine)[name].state(own).computed for own in unfinished)])
    assert [done[str(number)].token_ids for number in range(2)] == wanted
    assert SHORT - 5 <= read <= SHORT
    assert name in done["1"].stats.sources
    assert ("half" in done["1"].stats.sources) == pooled
    save_draft(short(target), tmp_path / "again", target)
    engine.load_draft(tmp_path / "again", name="short" if pooled else None)
