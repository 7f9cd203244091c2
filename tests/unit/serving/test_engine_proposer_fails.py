"""A proposer that raises or leaves NaN behind: speculation pauses and comes back, and text never changes."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch

from distillspec.config import GateConfig
from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.backoff import Backoff
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.requests import RequestOutput, SequenceState
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.ngram import Ngram
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.step.output import StepOutput

from .conftest import MakeEngine, hf_greedy, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = [3 + i * 7 % 200 for i in range(700)]  # more than a draft reads in one step


def drafts_of(engine: Engine) -> DraftModel:
    assert isinstance(engine.proposer, DraftModel)
    return engine.proposer


def poison(engine: Engine, slot: int, places: int) -> None:
    """NaN in the draft's cache, in the first places of a slot."""
    with torch.inference_mode():
        for keys, values in drafts_of(engine).runner.cache.layers.values():
            keys[slot, :places] = torch.nan
            values[slot, :places] = torch.nan


def fail_at(engine: Engine, attempts: range, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let some calls of `propose` raise, after they have written NaN. Return the steps of the calls."""
    propose, calls, step = drafts_of(engine).propose, list[int](), [0]
    run = engine.step

    def counted() -> StepOutput:
        step[0] += 1
        return run()

    def failing(requests: list[Any]) -> Any:
        calls.append(step[0])
        if len(calls) - 1 in attempts:
            propose(requests)
            for request in requests:
                poison(engine, request.sequence.held_slot, len(request.sequence.tokens))
            raise RuntimeError(f"out of memory: {len(calls)} bytes")
        return propose(requests)

    monkeypatch.setattr(engine, "step", counted)
    monkeypatch.setattr(drafts_of(engine), "propose", failing)
    return calls


def run(engine: Engine, asked: list[list[int]], params: SamplingParams = GREEDY) -> dict[str, RequestOutput]:
    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), tuple(prompt), params))
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step().finished})
        engine.check_integrity()
    return done


def test_after_one_exception_the_same_requests_are_drafted_for_again(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(3)
    wanted = [hf_greedy(target, prompt, 40) for prompt in asked]
    engine = make_engine(draft, speculation_length=2)
    calls = fail_at(engine, range(2, 3), monkeypatch)
    done = run(engine, asked, SamplingParams(temperature=0.0, max_tokens=40))
    assert [list(done[str(i)].token_ids) for i in range(3)] == wanted
    before, failed, after = calls[1:4]
    assert (failed - before, after - failed) == (1, 4)
    assert len(calls) > 10
    # One of two calls without failure drafts as much for every row: what NaN the failure left is gone.
    assert all(done[str(i)].stats.proposed > len(calls) for i in range(3) if len(wanted[i]) == 40)


def test_a_proposer_that_always_fails_is_asked_less_and_less_and_told_of_once(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(draft)
    calls = fail_at(engine, range(10**6), monkeypatch)
    caplog.set_level(logging.WARNING, logger="distillspec.serving.proposers.guarded_proposer")
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    done = run(engine, prompts(2), params)
    assert sum(output.stats.proposed for output in done.values()) == 0
    assert [later - sooner for sooner, later in pairwise(calls)] == [4, 8, 16, 32, 64]
    (told,) = [r.getMessage() for r in caplog.records if r.name == "distillspec.serving.proposers.guarded_proposer"]
    assert "no speculation for 4 steps: the proposer failed (RuntimeError: out of memory: 1 bytes)" in told


def test_another_proposer_starts_without_the_last_ones_record(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(draft)
    fail_at(engine, range(10**6), monkeypatch)
    engine.submit(Request("a", tuple(prompts()[1]), GREEDY))
    for _ in range(8):
        engine.step()
    engine.use_draft(draft, "next")
    output = engine.step()
    assert output.result is not None
    assert [row.nodes for row in output.result.rows] == [4]


def test_waiting_doubles_and_ends_after_as_many_successes() -> None:
    backoff = Backoff(first=2, most=8)
    assert not backoff.waits
    assert [backoff.failed() for _ in range(4)] == [2, 4, 8, 8]
    for _ in range(7):
        backoff.step()
    assert backoff.waits
    backoff.step()
    assert not backoff.waits
    for _ in range(7):
        backoff.succeeded()
    assert backoff.failed() == 8, "too few successes"
    for _ in range(8):
        backoff.succeeded()
    assert backoff.failed() == 2


def test_a_draft_that_raises_is_not_overlooked_by_the_monitor(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is asked and while it rests: requests that it failed count as one rejection each."""
    engine = make_engine(draft)
    served = ServedAcceptance(GateConfig(bootstrap_samples=100))
    engine.observer = lambda emissions, logits: served.watch(emissions)
    fail_at(engine, range(10**6), monkeypatch)
    for lot in range(3):
        for i in range(2):
            engine.submit(Request(f"{lot}-{i}", tuple(prompts()[i]), SamplingParams(max_tokens=6, ignore_eos=True)))
        while engine.has_work:
            served.finish(engine.step().finished)
    figures = served.figures()["versions"][drafts_of(engine).version]
    assert (figures["tried"], figures["accepted"]) == (6, 0)


@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_nan_of_a_text_read_in_part_reaches_nobody(
    leaves: str, draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the row that is moved into the slot, nor the one that is admitted into it."""
    engine = make_engine(draft, max_slots=2, max_model_len=1024, prefill_chunk=1024, speculation_length=2)
    engine.submit(Request("long", tuple(LONG), GREEDY))
    engine.submit(Request("moved", tuple(prompts()[1]), GREEDY))
    sequences = engine.sequences
    for _ in range(20):
        engine.step()
        (long,) = [s for s in sequences.running if s.request.id == "long"]
        read = drafts_of(engine).state(long.id).computed
        if read:
            break
    assert 0 < read < len(LONG) - 100, "the draft is in the middle of reading"
    assert long.slot == 0
    poison(engine, 0, read)
    if leaves == "aborted":
        engine.abort("long")
    else:
        engine.at_next_step(lambda: sequences.preempt(long))
    engine.submit(Request("next", tuple(prompts()[3]), GREEDY))
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        rows = list(sequences.unfinished.values())
        done.update({output.request_id: output for output in engine.step().finished})
        assert not any(row.failed_sources for row in rows)
    for name in ("moved", "next"):
        assert done[name].stats.proposed > 20


def test_a_row_that_went_on_plain_keeps_its_slots_draft_cache_when_it_leaves(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafted, so its logits were checked: clearing the slot would cost time for nothing."""
    engine = make_engine(draft, max_slots=2, controller="fixed", speculation_length=2)
    cleared: list[int] = []  # slots, from their first place on: memory that is no longer reserved may go
    noted = lambda slot, start=0: cleared.append(slot) if start == 0 else None  # noqa: E731
    monkeypatch.setattr(drafts_of(engine).runner.cache, "clear", noted)
    engine.submit(Request("plain", tuple(prompts()[0]), SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    (sequence,) = engine.sequences.running
    assert drafts_of(engine).state(sequence.id).computed, "it drafted"
    engine.at_next_step(lambda: engine.use_controller(FixedLength(0)))
    while engine.has_work:
        engine.step()
    assert len(sequence.tokens) - sequence.stats.prefix_tokens > 30
    assert cleared == []


def test_rows_that_may_not_draft_are_not_failed_by_a_resting_proposer(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(draft)
    fail_at(engine, range(10**6), monkeypatch)
    engine.submit(Request("asks", tuple(prompts()[0]), SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.submit(
        Request("not", tuple(prompts()[1]), SamplingParams(max_tokens=20, ignore_eos=True, speculation_length=0))
    )
    failed: dict[str, set[str]] = {}
    while engine.has_work:
        rows = list(engine.sequences.unfinished.values())
        engine.step()
        failed.update({row.request.id: set(row.failed_sources) for row in rows})
    assert failed == {"asks": {DRAFT}, "not": set()}


@pytest.mark.parametrize("proposer", ["ngram", ["ngram", "draft_model"]])
def test_a_proposer_that_cannot_foresee_only_pauses(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    proposer: str | list[str],
) -> None:
    """What it can propose is asked before a step is planned, where an exception would end the engine."""
    calls = list[str]()

    def failing(ngram: Ngram, sequence: SequenceState) -> Any:
        calls.append(sequence.id)
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(Ngram, "foreseen", failing)
    caplog.set_level(logging.WARNING, logger="distillspec.serving.proposers.guarded_proposer")
    engine = make_engine(draft if "draft_model" in proposer else None, proposer=proposer, speculation_length=2)
    asked = prompts(2)
    done = run(engine, asked)
    assert [list(done[str(i)].token_ids) for i in range(2)] == [hf_greedy(target, prompt, 40) for prompt in asked]
    assert 2 <= len(calls) < 20
    (told,) = [r.getMessage() for r in caplog.records if r.name == "distillspec.serving.proposers.guarded_proposer"]
    assert "failed (ZeroDivisionError: float division by zero)" in told
    drafted = sum(output.stats.proposed for output in done.values())
    assert drafted > 20 if "draft_model" in proposer else drafted == 0  # the others go on


@pytest.mark.parametrize("call", ["committed", "leave_slot"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_proposer_that_raises_when_it_is_told_of_a_step_only_pauses(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    beside: bool,
) -> None:
    wanted = [hf_greedy(target, prompt, 40) for prompt in prompts(2)]
    engine = make_engine(draft, speculation_length=2)
    alone = drafts_of(engine)
    if beside:
        engine.use_proposer(SideBySide({DRAFT: alone, "ngram": Ngram()}))
    told = getattr(alone, call)
    calls = 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        told(*args)
        if calls == 1:
            raise RuntimeError("a device was lost")

    monkeypatch.setattr(alone, call, failing)
    done = run(engine, prompts(2), SamplingParams(temperature=0.0, max_tokens=40))
    assert [list(done[str(i)].token_ids) for i in range(2)] == wanted
    assert calls > 1
    again = run(engine, prompts(2), SamplingParams(temperature=0.0, max_tokens=40))
    assert sum(output.stats.proposed for output in again.values()) > 0, "it is asked again"
