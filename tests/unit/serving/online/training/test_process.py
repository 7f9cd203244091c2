"""The trainer as a process: one a folder, and its death harms nothing."""

from __future__ import annotations

import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import LossConfig
from distillspec.errors import RunError
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings, TrainerState
from distillspec.serving.online.state.lock import held
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training import trainer
from distillspec.serving.online.training.process import read_settings, run_trainer, write_settings
from distillspec.serving.online.training.trainers import Trainers

from ..conftest import Answer
from .conftest import changed, fill


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
    written = replace(settings, loss=LossConfig(mix={"fkl": 1, "lk": 0.2}), seed=5)
    write_settings(written)
    assert read_settings(Path(settings.online.folder)) == written


def test_a_judgement_that_fails_is_tried_again(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(replay, answer, 6)
    judge, calls = Trainers.judge, list[int]()

    def failing(trainers: Trainers) -> bool:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("the disk is away")
        return judge(trainers)

    monkeypatch.setattr(Trainers, "judge", failing)
    made = run_trainer(changed(settings, every_requests=4), lambda: False, max_updates=1, wait=lambda seconds: None)
    assert len(made) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "no verdict" in line]
    assert [line.split()[5] for line in said] == ["0.5", "1"]
    assert "the disk is away" in said[0]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_an_update_without_memory_is_tried_again(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    fill(replay, answer, 6)
    learn, calls = trainer.learn, list[int]()

    def no_memory(*own: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise error
        return learn(*own, **named)

    monkeypatch.setattr(trainer, "learn", no_memory)
    made = run_trainer(changed(settings, every_requests=4), lambda: False, max_updates=1, wait=lambda seconds: None)
    assert len(made) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "no update" in line]
    assert [line.split()[5] for line in said] == ["0.5", "1"]
    assert "out of memory; lower adapt.batch_tokens: " in said[0]


def test_text_of_a_deleted_tenant_is_out_of_memory_before_the_trainer_waits(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(replay, answer, 6, tenant="gone")
    log, learn, kept = ReplayLog(settings.layout.replay), trainer.learn, list[weakref.ref[Any]]()

    def learning(draft: Any, examples: Any, *own: Any, **named: Any) -> Any:
        kept.extend(weakref.ref(example.weights) for example in examples)
        return learn(draft, examples, *own, **named)

    def delete(stage: str) -> None:
        if stage == "learning":
            log.delete_tenant("gone")

    monkeypatch.setattr(trainer, "learn", learning)
    found = list[list[bool]]()
    run_trainer(
        changed(settings, every_requests=4),
        lambda: bool(found),
        on_stage=delete,
        wait=lambda seconds: found.append([ref() is not None for ref in kept]),
    )
    assert found == [[False] * 6]
