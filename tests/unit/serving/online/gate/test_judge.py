"""Candidates that cannot be judged are refused, or inconclusive where it is not their fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError, in_one_line
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.sampling import NonFiniteLogits
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.log.records import LogEntry, LoggedAnswer
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training import scoring
from distillspec.serving.online.training.trainer import OnlineTrainer

from ...test_engine_draft_swap import rewrite
from ..conftest import Answer
from .conftest import candidate, keeper_of, nearly_the_target, scored


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _not_a_number(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][:] = torch.nan
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def _other_shape(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("mlp.up_proj.weight"))
    state[name] = state[name][:-1].clone()
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    words = json.loads(file.read_text())
    words["added_tokens"][0]["content"] = "<|another|>"
    rewrite(folder, lambda: file.write_text(json.dumps(words)))


@pytest.mark.parametrize("damage", [_truncate, _not_a_number, _other_shape, _other_tokenizer])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bad_candidate_is_refused_and_the_old_one_serves(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    damage: Callable[[Path], None],
    when: str,
) -> None:
    """Damaged by the trainer itself (sealed with good digests), or on disk after it was registered."""
    serving = registry.current()

    def write(folder: Path) -> None:
        save_draft(nearly_the_target(target), folder, target)
        if when == "before" and damage is not _truncate:
            damage(folder)

    bad = registry.add(write)
    if when == "after" or damage is _truncate:
        damage(bad.path)
    scored(settings)
    keeper = keeper_of(settings, registry, logged, swap=lambda version, acceptance: pytest.fail("swapped in"))
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "refused"
    assert ("cannot be judged" in verdict.reason) == (when == "before" and damage is not _truncate)
    assert registry.current() == serving


def _out_of_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let judgements of more than `most` answers at once find no memory. Return a list that gets their numbers."""
    read, failed = ReplayLog.by_number, list[int]()

    def by_number(log: ReplayLog, entries: list[LogEntry]) -> dict[int, LoggedAnswer]:
        if len(entries) > most:
            failed.append(len(entries))
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")
        return read(log, entries)

    monkeypatch.setattr(ReplayLog, "by_number", by_number)
    return failed


def test_where_there_is_no_memory_for_several_answers_they_are_read_one_by_one(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = candidate(registry, nearly_the_target(target), target)
    failed = _out_of_memory(1, monkeypatch)
    assert len(scored(settings).table.of(made.name)) == 48
    assert sum(failed) == 48, "each answer was in one part that failed"
    keeper_of(settings, registry, logged).judge_newest()
    assert registry.get(made.name).status == "promoted"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        MemoryError("no memory"),
    ],
)
def test_a_judgement_without_memory_is_inconclusive_and_the_next_candidate_is_judged(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    made = candidate(registry, nearly_the_target(target), target)

    def no_memory(*given: object) -> None:
        raise error

    with monkeypatch.context() as short:
        short.setattr(scoring, "logged_score", no_memory)
        assert not scored(settings).table.of(made.name)
    verdict = keeper_of(settings, registry, logged).judge_newest()
    assert verdict is not None
    assert verdict.decision == registry.get(made.name).status == "inconclusive"
    assert verdict.reason == f"there is no memory to judge it: {in_one_line(error)}"
    following = candidate(registry, nearly_the_target(target), target)
    scored(settings)
    keeper_of(settings, registry, logged).judge_newest()
    assert registry.get(following.name).status == "promoted"


def test_a_suspicion_without_memory_stays_and_is_looked_into_later(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says nothing of the version in service, nor keeps candidates from being judged."""
    serving = candidate(registry, nearly_the_target(target), target)
    registry.promote(serving.name, "by hand")
    replay.append([answer(f"r{i}", time_s=1e11) for i in range(4)])
    made, now = candidate(registry, nearly_the_target(target, 2), target), [0.0]
    scorer = OnlineTrainer(settings, clock=lambda: now[0]).scorer
    with monkeypatch.context() as short:
        _out_of_memory(0, short)
        assert scorer.work(suspected=True) == 0
    assert (scorer.table.problem(serving.name), scorer.table.shortage(serving.name)) == (None, None)
    assert scorer.work(suspected=True) == 4
    assert len(scorer.table.of(made.name)) == 4
    assert scorer.work(suspected=True) == 0
    before = registry.predecessor()
    assert before is not None
    assert not scorer.table.of(before.name)
    now[0] += scoring.REST_S
    assert scorer.work(suspected=True) == 4
    assert len(scorer.table.of(before.name)) == 4


def test_a_target_that_there_is_no_memory_for_refuses_no_draft(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The candidate alone reads its states."""
    made = candidate(registry, initialise_draft(DraftConfig(kind="eagle"), target), target)

    def no_memory(*given: object) -> None:
        raise ConfigError("target.path=tiny does not fit into the memory of cuda") from torch.OutOfMemoryError("20 GiB")

    monkeypatch.setattr("distillspec.serving.online.training.loaded_target.load_target", no_memory)
    scored(settings)
    verdict = keeper_of(settings, registry, logged).judge_newest()
    assert verdict is not None
    assert verdict.decision == registry.get(made.name).status == "inconclusive"
    assert "no memory to judge it: target.path=tiny does not fit" in verdict.reason


def test_what_keeps_both_drafts_from_being_judged_is_nobodys_fault(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    """Such as a trainer elsewhere with another target. A suspected version must not be rolled back for it."""
    made = candidate(registry, initialise_draft(DraftConfig(kind="eagle"), target), target)
    registry.promote(made.name, "better")
    second = candidate(registry, initialise_draft(DraftConfig(kind="eagle", layers=2), target), target)
    foreign = replace(settings, target=replace(settings.target, path="no/such-model"))
    scorer = OnlineTrainer(foreign).scorer
    with pytest.raises(ConfigError, match="no/such-model"):
        scorer.work(suspected=False)
    assert [scorer.table.problem(version.name) for version in (made, second)] == [None, None]
    assert keeper_of(settings, registry, logged).judge_newest() is None


def test_an_answer_deleted_before_it_was_scored_is_no_evidence(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel, answer: Answer
) -> None:
    logged.append([answer(f"gone{i}", tenant="gone") for i in range(3)])
    candidate(registry, nearly_the_target(target), target)
    scorer = OnlineTrainer(settings).scorer
    scorer.work(suspected=False)
    logged.delete_tenant("gone")
    scored(settings)
    verdict = keeper_of(settings, registry, logged).judge_newest()
    assert verdict is not None
    assert verdict.requests == 48


@pytest.mark.parametrize("kind", ["eagle", "pruned"])
def test_the_target_reads_again_where_that_is_asked_for(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel, kind: str
) -> None:
    """By whole distributions and by the log, the same answers take as many blocks: these rest on p(x) alone."""
    made = candidate(registry, initialise_draft(DraftConfig(kind=kind), target), target)
    found = []
    for evidence in ("log", "target"):
        asked = replace(settings, gate=replace(settings.gate, evidence=evidence))
        table = scored(asked).table
        scores = table.of(made.name)
        table.keep_only([])
        assert len(scores) == 48
        found.append([sum(s.blocks[0] for s in scores.values()), sum(s.positions for s in scores.values())])
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_what_was_made_from_a_version_that_was_rolled_back_is_refused(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    bad = candidate(registry, nearly_the_target(target), target)
    registry.promote(bad.name, "slipped through")
    child = candidate(registry, nearly_the_target(target), target)
    registry.rollback("worse in service")
    verdict = keeper_of(settings, registry, logged).judge_newest()
    assert verdict is not None
    assert verdict.candidate == child.name
    assert verdict.decision == "refused"
    assert f"made from {bad.name}, which was rolled back" in verdict.reason


def test_one_answer_on_which_drafts_are_not_finite_keeps_nobody_from_being_judged(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is accepted there. Answers are logged for weeks, and such a one was met again and again."""
    serving, better = registry.current(), candidate(registry, nearly_the_target(target), target)
    assert serving is not None
    finite = scoring.logged_score

    def score(draft: LanguageModel, answer: LoggedAnswer, *rest: Any) -> Score:
        if answer.request_id == "r2":
            raise NonFiniteLogits("the draft: NaN at position 3")
        return finite(draft, answer, *rest)

    monkeypatch.setattr(scoring, "logged_score", score)
    table = scored(settings).table
    (bad,) = [entry.number for entry in logged.entries() if entry.request_id == "r2"]
    for version in (serving, better):
        assert table.problem(version.name) is None
        scores = table.of(version.name)
        assert len(scores) == 48
        assert (scores[bad].alpha, scores[bad].positions) == (0.0, 20)
        assert scores[bad].tokens == scores[bad].blocks
    keeper_of(settings, registry, logged).judge_newest()
    assert registry.get(better.name).status == "promoted"
