"""Drafts of a pool fail one by one: the others go on, and when none is left the operator is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide

from .conftest import MakeEngine, plain_answers, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
ALARM = "no healthy draft is left"


@pytest.fixture
def pair(draft: LanguageModel, truncated_draft: LanguageModel) -> dict[str, LanguageModel]:
    return {"half": replace(draft, evaluated=0.6), "small": truncated_draft}


def member(engine: Engine, name: str) -> DraftModel:
    assert isinstance(engine.proposer, SideBySide)
    found = engine.proposer.proposers[name]
    assert isinstance(found, DraftModel)
    return found


def give_nan(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a draft give NaN for every new answer. Return the rows of its calls."""
    broken, calls = member(engine, name), list[int]()
    propose = broken.propose

    def spoiling(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        calls.append(len(requests))
        with torch.inference_mode():
            for keys, _ in broken.runner.cache.layers.values():
                keys[:] = torch.nan
        for request in requests:
            broken.state(request.sequence.id).computed = max(1, len(request.sequence.tokens) - 1)
        return propose(requests)

    monkeypatch.setattr(broken, "propose", spoiling)
    return calls


def raise_always(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(requests: Sequence[Any]) -> Any:
        raise RuntimeError("a device was lost")

    monkeypatch.setattr(member(engine, name), "propose", failing)


def collapse(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a draft propose what the target never writes."""

    def wrong(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [TokenTree.chain((0,) * request.speculation_length, source=name) for request in requests]

    monkeypatch.setattr(member(engine, name), "propose", wrong)


def check(engine: Engine, target: LanguageModel, asked: list[list[int]]) -> list[dict[str, int]]:
    """Answer prompts one after another as the target does alone. Return the sources of each."""
    wanted, found = plain_answers(target, asked, [GREEDY] * len(asked)), []
    for prompt, own in zip(asked, wanted, strict=True):
        (output,) = engine.generate([prompt], GREEDY)
        assert output.token_ids == own
        found.append(output.stats.sources)
    engine.check_integrity()
    return found


def told(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_draft_that_always_gives_nan_rests_and_the_other_goes_on(
    target: LanguageModel,
    pair: dict[str, LanguageModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(pair, selection="fixed", speculation_length=2, compile=False)
    assert all("half" in own for own in check(engine, target, prompts(1)))  # its cache is there, to be spoilt
    calls = give_nan(engine, "half", monkeypatch)
    assert dict(engine.draft_health) == {"half": True, "small": True}
    with caplog.at_level(logging.WARNING):
        sources = check(engine, target, prompts(8))
    assert dict(engine.draft_health) == {"half": False, "small": True}
    assert all("small" in own for own in sources)
    assert not any("half" in own for own in sources)
    assert 3 <= len(calls) < 8, "not for every answer"
    assert len(told(caplog, "its logits were NaN or infinite for 3 answers in a row")) == 1
    assert told(caplog, ALARM) == []


@pytest.mark.parametrize("how", ["raises", "NaN", "collapses"])
def test_when_the_last_healthy_draft_fails_rows_decode_plainly_and_an_error_is_logged_once(
    target: LanguageModel,
    pair: dict[str, LanguageModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    engine = make_engine(pair, selection="fixed", speculation_length=2, compile=False)
    raise_always(engine, "small", monkeypatch)
    fail = {"raises": raise_always, "NaN": give_nan, "collapses": collapse}[how]
    fail(engine, "half", monkeypatch)
    # The other one is asked, and fails, where the first rests.
    with caplog.at_level(logging.WARNING):
        check(engine, target, prompts(8))
        check(engine, target, prompts(8))
    assert dict(engine.draft_health) == {"half": False, "small": False}
    (line,) = told(caplog, ALARM)
    assert "(half, small)" in line
    assert {record.levelno for record in caplog.records if ALARM in record.getMessage()} == {logging.ERROR}
    engine.use_draft(pair["small"], "again", name="small")
    sources = check(engine, target, prompts(2))
    assert dict(engine.draft_health) == {"half": False, "small": True}
    assert all("small" in own for own in sources)


def test_a_collapse_is_noticed_where_the_selection_does_not_learn_of_it(
    target: LanguageModel,
    pair: dict[str, LanguageModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(pair, selection="fixed", speculation_length=2, compile=False)
    collapse(engine, "half", monkeypatch)
    sources = [own for _ in range(2) for own in check(engine, target, prompts(8))]
    assert not engine.draft_health["half"]
    assert "half" in sources[0]
    assert list(sources[-1]) == ["small"]


def test_a_wholly_collapsed_pool_has_no_healthy_draft_where_the_selection_learns_of_it(
    target: LanguageModel,
    pair: dict[str, LanguageModel],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """goodput leaves a collapsed draft for the other one, and goes on trying both. Nothing rests."""
    both = {name: replace(draft, evaluated=0.6) for name, draft in pair.items()}
    engine = make_engine(both, speculation_length=2, compile=False)
    assert engine.settings.selection == "goodput"
    engine.generate(prompts(8), GREEDY)
    assert dict(engine.draft_health) == {"half": True, "small": True}
    for name in both:
        collapse(engine, name, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            engine.generate(prompts(8), GREEDY)
        assert dict(engine.draft_health) == {"half": False, "small": False}
        sources = check(engine, target, prompts(2))
    assert all(sources), "rows go on to draft: the selection has no draft that is better"
    (line,) = told(caplog, ALARM)
    assert "(half, small)" in line
    assert len(told(caplog, "left to the selection")) == 2
    engine.use_draft(pair["half"], "again", name="half")
    check(engine, target, prompts(1))
    assert dict(engine.draft_health) == {"half": True, "small": False}
