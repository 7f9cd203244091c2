"""The trainer in its files: when it learns, what it leaves, and that its death harms nobody."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.config import AdaptConfig, LossConfig
from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel
from distillspec.serving.online.drift import DriftDetector
from distillspec.serving.online.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.lock import held
from distillspec.serving.online.process import OCCUPIED, read_settings, run_trainer, write_settings
from distillspec.serving.online.records import LogKey
from distillspec.serving.online.registry import VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.online.supervisor import TOO_OFTEN, Supervisor
from distillspec.serving.online.trainer import OnlineTrainer

from ..test_draft_swap import rewrite
from .conftest import Answer

QUICK = {"max_steps": 3, "epochs": 1, "min_requests": 4, "on_drift": False}


def changed(settings: OnlineSettings, **adapt: object) -> OnlineSettings:
    return replace(settings, adapt=AdaptConfig(**{**QUICK, **adapt}))  # type: ignore[arg-type]


def fill(replay: ReplayLog, answer: Answer, count: int, start: int = 0, **extra: object) -> None:
    replay.append([answer(f"r{start + i}", **extra) for i in range(count)])


def test_an_update_leaves_a_candidate_that_says_where_it_comes_from(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer, target: LanguageModel
) -> None:
    fill(replay, answer, 6)
    replay.append([answer("held", split="held_out")])
    (version,) = run_trainer(changed(settings), lambda: False, once=True)
    first = registry.current()
    assert first is not None
    assert (version.status, version.parent) == ("candidate", first.name)
    assert (version.first_request, version.last_request) == (1, 6)  # the held-out one is not among them
    assert version.metrics["steps"] > 0
    assert registry.current() == first
    state = TrainerState.read(settings.layout.state)
    assert (state.cursor, state.updates, state.working) == (7, 1, version.name)


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
    trainer.update("asked")
    assert trainer.due() is None
    idle = OnlineTrainer(changed(settings, every_requests=1, min_requests=1, idle_only=True))
    fill(replay, answer, 3, 9)
    TrainerControl(idle=False).write(settings.layout.control)
    assert idle.due() is None
    TrainerControl(idle=True).write(settings.layout.control)
    assert idle.due() == "requests"


def test_an_update_is_due_when_acceptance_falls(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    good = torch.zeros(20, dtype=torch.uint8)
    trainer = OnlineTrainer(changed(settings, every_requests=None, on_drift=True, drift_drop=0.1))
    fill(replay, answer, 100, outcomes=good)
    assert trainer.due() is None
    fill(replay, answer, 40, 100, outcomes=good + 1)
    assert trainer.due() == "drift"


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
    told: list[dict] = []
    trainer = OnlineTrainer(small, report=told.append)
    lags = []
    for lot in range(3):
        fill(replay, answer, 40, 40 * lot)
        assert trainer.due() == "requests"
        trainer.update("requests")
        lags.append(replay.newest_number() - trainer.state.cursor)
    assert lags == [0, 0, 0]
    assert (trainer.state.learnt, trainer.state.skipped) == (3 * 12, 3 * 28)
    assert told[-1]["drop_rate"] == TrainerState.read(settings.layout.state).drop_rate == pytest.approx(0.7)


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
    assert restarted.drift.averages() == trainer.drift.averages()
    fill(replay, answer, 60, 170, outcomes=good)
    fill(replay, answer, 30, 230, outcomes=good + 1)
    assert restarted.due() == "drift"  # another one is


def test_traffic_without_a_name_counts_once() -> None:
    named, nameless = DriftDetector(0.1), DriftDetector(0.1)
    for i in range(100):
        named.add("a", 10, i % 10)
        nameless.add("", 10, i % 10)
    assert nameless.averages()[""] == named.averages()["a"] == named.averages()[""]


def test_an_update_that_comes_to_nothing_is_tried_again_later_and_later(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(replay, answer, 6)
    serving = registry.current()
    assert serving is not None
    weights = serving.path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    waited = 0.0

    def wait(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        if waited > 100:
            weights.write_bytes(whole)

    made = run_trainer(changed(settings, every_requests=4), lambda: waited > 200, max_updates=1, wait=wait)
    said = [line for line in capsys.readouterr().err.splitlines() if "no update" in line]
    assert [line.split()[5] for line in said] == ["0.5", "1", "2", "4", "8", "16", "32", "60"]
    assert "cannot be trained on" in said[0]
    assert len(made) == 1


def test_a_servers_trainer_waits_for_one_that_somebody_started_by_hand(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 5)
    now = [0.0]
    real = Supervisor(changed(settings))
    with held(settings.layout.trainer / "trainer.lock"):
        real.poll()
        assert real._process is not None
        assert real._process.wait(60) == OCCUPIED
        real.poll()
    assert real.occupied
    said = (settings.layout.trainer / "trainer.log").read_text()
    assert f"another trainer works on {settings.online.folder}" in said

    command = [sys.executable, "-c", f"raise SystemExit({OCCUPIED})"]
    supervisor = Supervisor(changed(settings), command=command, clock=lambda: now[0])
    for _ in range(TOO_OFTEN + 1):
        supervisor.poll()
        assert supervisor._process is not None
        supervisor._process.wait()
        supervisor.poll()
        assert supervisor._next_s > now[0]
        now[0] = supervisor._next_s
    assert supervisor.occupied
    assert supervisor.problem is None
    assert supervisor.starts == TOO_OFTEN + 1


def test_an_update_that_comes_to_nothing_is_still_due(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    """Asked for by hand, by drift, by time: each reason holds until something was learnt."""
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


def test_of_two_trainers_on_one_folder_the_second_says_so(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 5)
    with (
        held(settings.layout.trainer / "trainer.lock"),
        pytest.raises(RunError, match=r"another trainer works on .* \(process \d+\)"),
    ):
        run_trainer(changed(settings), lambda: False, once=True)
    assert len(run_trainer(changed(settings), lambda: False, once=True)) == 1


def test_a_draft_with_another_tokenizer_than_the_logs_is_refused(
    settings: OnlineSettings, registry: VersionRegistry, target: LanguageModel, answer: Answer
) -> None:
    key = LogKey(target.identity.weights_hash, "another", target.identity.vocab_size, 16)
    foreign = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0)
    fill(foreign, answer, 5)
    with pytest.raises(ConfigError, match="different tokenizers"):
        run_trainer(changed(settings), lambda: False, once=True)


def test_a_trainer_killed_at_any_stage_harms_nothing(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 6)
    serving = registry.current()
    write_settings(changed(settings))
    script = Path(__file__).with_name("kill_at_stages.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), settings.online.folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    stages = ("selecting", "loading", "learning", "saving", "registering")
    said = [line.removeprefix("trainer: ") for line in done.stdout.splitlines() if line.startswith("trainer: ")]
    assert said == [*(f"{stage} killed" for stage in stages), "None 0"], done.stderr
    assert registry.current() == serving
    assert serving is not None
    assert registry.problem_of(serving) is None
    (version,) = registry.versions("candidate")  # of the one that was let through
    assert registry.problem_of(version) is None
    assert TrainerState.read(settings.layout.state).updates == 1
    registry.clear_away(keep=0)
    assert {p.name for p in registry.folder.iterdir() if p.is_dir()} == {serving.name, version.name}


def test_settings_reach_the_process(settings: OnlineSettings) -> None:
    told = replace(settings, loss=LossConfig(mix={"fkl": 1, "lk": 0.2}), seed=5)
    write_settings(told)
    assert read_settings(Path(settings.online.folder)) == told


@pytest.mark.parametrize("code", [0, 1])
def test_a_trainer_that_keeps_ending_is_given_up(settings: OnlineSettings, code: int) -> None:
    now = [0.0]
    supervisor = Supervisor(settings, command=[sys.executable, "-c", f"raise SystemExit({code})"], clock=lambda: now[0])
    waits = []
    for _ in range(TOO_OFTEN):
        supervisor.poll()
        assert supervisor._process is not None
        supervisor._process.wait()
        supervisor.poll()
        waits.append(supervisor._next_s - now[0])
        now[0] = max(now[0], supervisor._next_s)
    assert f"{TOO_OFTEN} times in a row" in str(supervisor.problem)
    assert waits[:3] == [1.0, 2.0, 4.0]
    supervisor.poll()
    assert supervisor.pid is None
    supervisor.stop()


def test_an_update_beside_its_anchor_leaves_a_candidate(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 5)
    (version,) = run_trainer(changed(settings, anchor=0.5), lambda: False, once=True)
    assert version.metrics["problem"] == ""
    assert version.metrics["steps"] > 0
    assert registry.problem_of(version) is None
