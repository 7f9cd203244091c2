"""The trainer in its files: when it learns, from what, and what it leaves."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.data.prompts import prompt_key
from distillspec.data.trained_prompts import trained_prompts
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, read_metadata
from distillspec.serving.base.owner_files import hashed
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.supervisor import Supervisor
from distillspec.serving.online.training.trainer import OnlineTrainer, Overtaken

from ...test_engine_draft_swap import rewrite
from ..conftest import Answer
from .conftest import changed, fill


def test_an_update_leaves_a_candidate_that_says_where_it_comes_from(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, target: LanguageModel
) -> None:
    fill(replay, answer, 6)
    (version,) = run_trainer(changed(settings), lambda: False, once=True)
    first = registry.current()
    assert first is not None
    assert (version.status, version.parent) == ("candidate", first.name)
    assert (version.first_request, version.last_request) == (1, 6)
    assert version.metrics["steps"] > 0
    learnt = {prompt_key(own.sample().prompt_ids) for own in replay.load(replay.entries())}
    assert trained_prompts(read_metadata(version.path)["lineage"]) == learnt, "distill eval leaves them out"
    assert {weight.dtype for weight in load_file(version.path / "model.safetensors").values()} == {torch.bfloat16}
    memory = torch.load(settings.layout.memory, weights_only=True)
    assert {weight.dtype for weight in memory["weights"].values()} == {torch.float32}
    assert registry.current() == first
    state = TrainerState.read(settings.layout.state)
    assert (state.cursor, state.updates, state.working) == (6, 1, version.name)


def test_updates_are_due_by_requests_time_and_when_asked(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    now = [0.0]
    trainer = OnlineTrainer(changed(settings, every_requests=8, every_s=60.0), clock=lambda: now[0])
    assert trainer.due() is None
    fill(replay, answer, 3)
    now[0] = 100.0
    assert trainer.due() is None  # too few to be worth it
    fill(replay, answer, 3, 3)
    assert trainer.due() == "time"
    now[0] = 10.0
    assert trainer.due() is None
    fill(replay, answer, 3, 6)
    assert trainer.due() == "requests"
    TrainerControl(paused=True).write(settings.layout.control)
    assert trainer.due() is None
    TrainerControl(asked=1).write(settings.layout.control)
    assert trainer.due() == "asked"
    version = trainer.update("asked")
    assert version is not None
    assert trainer.due() is None
    fill(replay, answer, 8, 20)
    assert trainer.due() is None, "the candidate is judged first"
    registry.judged(version.name, "inconclusive", {}, "")
    assert trainer.due() == "requests"
    registry.judged(version.name, "inconclusive", {"gain": None}, "")
    assert trainer.due() == "requests", "one in vain may be chance"
    trainer.update("requests")
    registry.judged(registry.versions()[-1].name, "inconclusive", {}, "")


def test_an_update_is_due_when_acceptance_falls(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    good = torch.zeros(20, dtype=torch.uint8)
    trainer = OnlineTrainer(changed(settings, every_requests=None, on_drift=True, drift_drop=0.1))
    fill(replay, answer, 100, outcomes=good)
    assert trainer.due() is None
    fill(replay, answer, 40, 100, outcomes=good + 1)
    assert trainer.due() == "drift"


def test_drift_by_tenant_writes_no_tenants_name(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    records: list[dict] = []
    fill(replay, answer, 4, tenant="secret-tenant")
    trainer = OnlineTrainer(changed(settings, drift_by="tenant"), report=records.append)
    assert trainer.due() is None
    trainer.update("asked")
    found = TrainerState.read(settings.layout.state).drift
    assert len(found) == 2, "that tenant, and all traffic"
    assert found["all"] == found[hashed("secret-tenant")]
    written = [file.read_bytes() for file in settings.layout.trainer.rglob("*") if file.is_file()]
    assert b'"drift"' in b"".join(written)
    assert b"secret-tenant" not in b"".join(written)
    assert "secret-tenant" not in str(records)


def test_a_trainer_slower_than_traffic_skips_and_says_how_many(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 50)
    small = changed(settings, max_steps=1, batch_tokens=256, row_tokens=256, replay_share=0.0)
    (version,) = run_trainer(small, lambda: False, once=True)
    state = TrainerState.read(settings.layout.state)
    assert state.cursor == 50  # it never falls behind
    assert version.last_request == 50
    assert version.first_request == 50 - 12 + 1  # 256 tokens of answers
    assert state.skipped == 38


def test_lag_stays_bounded_and_the_drop_rate_is_shown(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    small = changed(settings, max_steps=1, batch_tokens=256, row_tokens=256, replay_share=0.0, every_requests=20)
    records: list[dict] = []
    trainer = OnlineTrainer(small, report=records.append)
    lags = []
    for lot in range(3):
        fill(replay, answer, 40, 40 * lot)
        assert trainer.due() == "requests"
        version = trainer.update("requests")
        assert version is not None
        registry.judged(version.name, "inconclusive", {}, "")
        lags.append(replay.newest_number() - trainer.state.cursor)
    assert lags == [0, 0, 0]
    assert (trainer.state.learnt, trainer.state.skipped) == (3 * 12, 3 * 28)
    assert records[-1]["began_s"] < records[-1]["time_s"]
    assert records[0]["time_s"] < records[1]["began_s"], "one update ended before the next one began"
    assert records[-1]["drop_rate"] == TrainerState.read(settings.layout.state).drop_rate == pytest.approx(0.7)


def test_small_gains_add_up_and_a_refusal_starts_over(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    first = registry.current()
    assert first is not None
    made = []
    for i, verdict in enumerate(["inconclusive", "refused", None]):
        fill(replay, answer, 5, 5 * i)
        (version,) = run_trainer(changed(settings), lambda: False, once=True)
        if verdict is not None:
            registry.judged(version.name, verdict, {}, "")
        made.append(version)
    assert [version.parent for version in made] == [first.name, made[0].name, first.name]


def test_what_led_to_a_version_that_was_taken_back_is_not_gone_on_from(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    first = registry.current()
    assert first is not None
    made = []
    for i in range(3):
        fill(replay, answer, 5, 5 * i)
        (version,) = run_trainer(changed(settings), lambda: False, once=True)
        made.append(version)
        if i == 0:
            registry.promote(version.name, "passed the gate")
        if i == 1:
            registry.rollback("worse in service")  # the second, a candidate still, was made from the first
    assert [version.parent for version in made] == [first.name, made[0].name, first.name]


def test_a_fall_that_was_answered_is_not_answered_again_after_a_restart(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    good, drifting = torch.zeros(20, dtype=torch.uint8), changed(settings, every_requests=None, on_drift=True)
    fill(replay, answer, 100, outcomes=good)
    fill(replay, answer, 60, 100, outcomes=good + 1)
    trainer = OnlineTrainer(drifting)
    assert trainer.due() == "drift"
    trainer.update("drift")
    restarted = OnlineTrainer(drifting)
    fill(replay, answer, 10, 160, outcomes=good + 1)
    assert trainer.due() is None
    assert restarted.due() is None
    assert restarted.drift.detector.averages() == trainer.drift.detector.averages()
    fill(replay, answer, 60, 170, outcomes=good)
    fill(replay, answer, 30, 230, outcomes=good + 1)
    assert restarted.due() == "drift"  # another one is


def test_an_update_that_comes_to_nothing_is_still_due(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    """By hand, by drift, by time: each reason holds until something was learnt."""
    now = [0.0]
    config = changed(settings, every_requests=None, every_s=60.0, on_drift=True)
    trainer = OnlineTrainer(config, clock=lambda: now[0])
    good = torch.zeros(20, dtype=torch.uint8)
    fill(replay, answer, 100, outcomes=good)
    fill(replay, answer, 60, 100, outcomes=good + 1)
    serving = registry.current()
    assert serving is not None
    weights = serving.path / "model.safetensors"
    whole = weights.read_bytes()
    for reason, asked, now_s in (("asked", 1, 0.0), ("drift", 0, 0.0), ("time", 0, 100.0)):
        TrainerControl(asked=asked).write(settings.layout.control)
        now[0] = now_s
        weights.write_bytes(whole[:-8])
        assert trainer.due() == reason
        with pytest.raises(RunError, match="cannot be trained on"):
            trainer.update(reason)
        assert trainer.due() == reason
        assert TrainerState.read(settings.layout.state).asked == 0
    weights.write_bytes(whole)
    TrainerControl(asked=1).write(settings.layout.control)
    assert trainer.due() == "asked"
    trainer.update("asked")
    fill(replay, answer, 4, 160)
    assert trainer.due() is None
    assert TrainerState.read(settings.layout.state).asked == 1


@pytest.mark.parametrize("stage", ["loading", "learning"])
def test_no_version_comes_of_a_tenant_deleted_while_it_was_learnt_from(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, stage: str
) -> None:
    fill(replay, answer, 5, tenant="stays")
    fill(replay, answer, 5, 5, tenant="gone")
    log = ReplayLog(settings.layout.replay)

    def delete(reached: str) -> None:
        if reached == stage and log.tenants().get("gone"):
            log.delete_tenant("gone")

    trainer = OnlineTrainer(changed(settings), on_stage=delete)
    with pytest.raises(RunError, match="was deleted while"):
        trainer.update("asked")
    assert registry.versions("candidate") == []
    assert TrainerState.read(settings.layout.state).bad_updates == 0
    version = trainer.update("asked")
    assert version is not None
    assert (version.first_request, version.last_request) == (1, 5)


@pytest.mark.parametrize(
    ("tenant", "steps", "outcome"),
    [("gone", 2, pytest.raises(RunError, match="was deleted while")), ("never-here", 3, nullcontext())],
)
def test_an_update_ends_before_its_next_step_if_a_tenant_is_deleted_that_it_learns_from(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    tenant: str,
    steps: int,
    outcome: AbstractContextManager[object],
) -> None:
    fill(replay, answer, 5, tenant="stays")
    fill(replay, answer, 5, 5, tenant="gone")
    log, stages = ReplayLog(settings.layout.replay), list[str]()

    def delete(reached: str) -> None:
        stages.append(reached)
        if stages.count("learning") == 2 and reached == "learning":
            log.delete_tenant(tenant)

    trainer = OnlineTrainer(changed(settings, epochs=3), on_stage=delete)
    with outcome:
        trainer.update("asked")
    assert stages.count("learning") == steps
    assert stages[-1] == "waiting"
    assert len(registry.versions("candidate")) == ("saving" in stages) == (tenant == "never-here")


def test_a_trainer_holds_no_answer_between_updates(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    replay.append([answer(f"held {number}") for number in range(8)])
    trainer = OnlineTrainer(changed(settings, epochs=2))
    assert trainer.update("asked") is not None
    gc.collect()
    answers = [own for own in gc.get_objects() if isinstance(own, LoggedAnswer)]
    assert [own.request_id for own in answers if own.request_id.startswith("held")] == []


@pytest.mark.parametrize("after", [1, 2])
def test_a_suspicion_ends_an_update_and_keeps_others_from_starting(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, after: int
) -> None:
    fill(replay, answer, 8)
    urgent, stages = TrainerControl(suspected=True, urgent_until_s=time.time() + 600.0), list[str]()

    def suspect(stage: str) -> None:
        stages.append(stage)
        if stages.count("learning") == after:
            urgent.write(settings.layout.control)

    trainer = OnlineTrainer(changed(settings, every_requests=4, epochs=3), on_stage=suspect)
    assert trainer.due() == "requests"
    with pytest.raises(Overtaken):
        trainer.update("requests")
    assert stages.count("learning") == after
    assert registry.versions("candidate") == []
    state = TrainerState.read(settings.layout.state)
    assert (state.stage, state.cursor, state.updates, state.bad_updates) == ("waiting", 0, 0, 0)
    assert trainer.due() is None
    replace(urgent, urgent_until_s=time.time()).write(settings.layout.control)
    assert trainer.due() == "requests", "what it would have learnt from waits, a lasting suspicion does not"


def test_an_update_asked_for_by_hand_runs_beside_a_suspicion(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 8)
    TrainerControl(asked=1, suspected=True, urgent_until_s=time.time() + 600.0).write(settings.layout.control)
    trainer = OnlineTrainer(changed(settings, every_requests=4))
    assert trainer.due() == "asked"
    assert trainer.update("asked") is not None
    fill(replay, answer, 8, 8)
    assert trainer.due() is None


def test_flush_mode_forgets(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    for i in range(2):
        fill(replay, answer, 5, 5 * i)
        (version,) = run_trainer(changed(settings, mode="flush"), lambda: False, once=True)
    assert (version.first_request, version.last_request) == (6, 10)


def test_updates_without_numbers_quarantine_the_trainer(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, target: LanguageModel
) -> None:
    serving = registry.current()
    assert serving is not None
    bad = registry.add(lambda folder: _copy_spoilt(serving.path, folder))
    registry.promote(bad.name, "by hand")
    trainer = OnlineTrainer(changed(settings, max_bad_updates=2))
    fill(replay, answer, 5)
    assert trainer.update("asked") is None
    fill(replay, answer, 5, 5)
    with pytest.raises(RunError, match="quarantined: 2 updates in a row"):
        trainer.update("asked")
    assert "no step was finite" in str(TrainerState.read(settings.layout.state).quarantined)
    assert registry.versions("candidate") == []
    supervisor = Supervisor(settings, command=[sys.executable, "-c", "pass"])
    supervisor.poll()
    assert "2 updates in a row" in str(supervisor.problem)
    assert supervisor.pid is None
    supervisor.lift()
    assert TrainerState.read(settings.layout.state).quarantined is None


def _copy_spoilt(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][:] = torch.nan
    rewrite(folder, lambda: save_file(state, folder / "model.safetensors", metadata={"format": "pt"}))


def test_a_draft_with_another_tokenizer_than_the_logs_is_refused(
    settings: OnlineSettings, registry: VersionRegistry, target: LanguageModel, answer: Answer
) -> None:
    key = LogKey(target.identity.weights_hash, "another", target.identity.vocab_size, 16)
    foreign = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0)
    fill(foreign, answer, 5)
    with pytest.raises(ConfigError, match="different tokenizers"):
        run_trainer(changed(settings), lambda: False, once=True)


def test_processor_time_is_counted_by_kind_of_work(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 6)
    trainer = OnlineTrainer(changed(settings, every_requests=4))
    trainer.update("asked")
    updated = TrainerState.read(settings.layout.state).cpu_s_by_work
    assert updated["judging"] == 0.0 < min(updated["loading"], updated["learning"])
    fill(replay, answer, 4, 6)
    assert trainer.judge()
    state = TrainerState.read(settings.layout.state)
    assert state.cpu_s_by_work == updated | {"judging": state.judging_cpu_s}
    assert state.judging_cpu_s > 0.0
    assert state.cpu_s_per(2) == pytest.approx(sum(state.cpu_s_by_work.values()) / 2)
    assert state.cpu_s_per(0) is None
