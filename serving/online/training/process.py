"""Work of the embedded trainer's process. `training.__main__` starts it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any, get_type_hints

import torch

from distillspec.errors import ConfigError, RunError, in_one_line, is_out_of_memory
from distillspec.files import OTHERS, write_json
from distillspec.models.memory import free_unused
from distillspec.serving.online.judging.question import candidate_question
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import Layout, OnlineSettings, read_states
from distillspec.serving.online.state.lock import Occupied, held
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.heartbeat import beating
from distillspec.serving.online.training.tracking import open_tracking
from distillspec.serving.online.training.trainer import OnlineTrainer, Overtaken
from distillspec.serving.online.training.trainers import Due, Trainers
from distillspec.serving.online.training.unlearning import unlearn
from distillspec.training.interrupts import listen_for_stop

POLL_S, LONGEST_WAIT_S = 0.5, 60.0
QUARANTINED, OCCUPIED = 3, 4  # exit codes: it must not be restarted, another trainer works on this folder


def write_settings(settings: OnlineSettings) -> None:
    """Write the settings to the file that the trainer process reads."""
    write_json(settings.layout.settings, asdict(settings))


def read_settings(root: Path) -> OnlineSettings:
    """Read what `write_settings` wrote in an online folder."""
    stored = json.loads(Layout(root).settings.read_text())
    kinds = get_type_hints(OnlineSettings)
    groups = {name: kinds[name](**values) for name, values in stored.items() if isinstance(values, dict)}
    settings = OnlineSettings(**{**stored, **groups})
    settings.online.folder = str(root)
    return settings


def run_trainer(
    settings: OnlineSettings,
    stopped: Callable[[], bool],
    *,
    report: Report | None = None,
    once: bool = False,
    judged: bool = False,
    without: str | None = None,
    max_updates: int | None = None,
    on_stage: Callable[[str], None] | None = None,
    wait: Callable[[float], Any] | None = None,
) -> list[Version]:
    """Train until `stopped`, or with `once` for one update a draft on what is logged. Return the candidates made.

    Args:
        judged: with `once`, score the candidate on answers that it did not learn from.
        without: a tenant to delete first, also from what was learnt. See `unlearn`.

    Raises:
        RunError: another trainer works on this folder (`Occupied`), or this one is quarantined.
        ConfigError: there is nothing to train, or nothing to train on.
    """
    config, layout = settings.adapt, settings.layout
    torch.set_num_threads(config.threads or 1)
    if config.gpu_memory_share is not None and torch.device(config.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(config.gpu_memory_share, torch.device(config.device).index)
    refusal = f"another trainer works on {layout.root}; end it first, or give this one another online.folder"
    with held(layout.trainer / "trainer.lock", wait=False, refusal=refusal):
        if without is not None:
            unlearn(settings, without)
        trainers = Trainers(settings, report, beating(layout.heartbeat, on_stage or (lambda stage: None)))
        if once:
            candidates = [_once(trainer, judged) for trainer in trainers.with_text()]
            return [version for version in candidates if version is not None]
        return _train(trainers, stopped, max_updates, beating(layout.heartbeat, wait or Event().wait))


def _once(trainer: OnlineTrainer, judged: bool) -> Version | None:
    """Make one update on what is logged. A candidate to be judged is scored on the newest answers, not taught by them.

    They are at most a third of the new answers.
    """
    new = trainer.replay.count(after=trainer.state.cursor)
    version = trainer.update("by hand", min(trainer.settings.gate.requests, new // 3) if judged else 0)
    question = candidate_question(trainer.registry)
    if judged and question is not None:
        trainer.scorer.finish(question)
    return version


def _train(
    trainers: Trainers, stopped: Callable[[], bool], max_updates: int | None, wait: Callable[[float], Any]
) -> list[Version]:
    """Judge, and make updates as they are due. After a failure the next try waits longer."""
    candidates: list[Version | None] = []
    pause = POLL_S
    while not stopped() and (max_updates is None or len(candidates) < max_updates):
        due = None
        try:
            if trainers.judge():
                continue
            due = trainers.due()
            if due is None:
                wait(POLL_S)
                continue
            candidates.append(due.trainer.update(due.reason))
            pause = POLL_S
            continue
        except Overtaken:
            continue
        except Exception as error:
            if not _may_pass(error) or _ends_all(due, trainers):
                raise
            done = "verdict" if due is None else "update"
            _complain(f"no {done}, and none for {pause:g} s: {_reason(error)}")
        free_unused()  # after the error, which held what the try had in memory
        for _ in range(round(pause / POLL_S)):
            if not stopped():
                wait(POLL_S)
        pause = min(LONGEST_WAIT_S, 2 * pause)
    return [version for version in candidates if version is not None]


def _may_pass(error: Exception) -> bool:
    """Return True if another try may not meet this error."""
    return isinstance(error, (RunError, OSError)) or is_out_of_memory(error)


def _ends_all(due: Due | None, trainers: Trainers) -> bool:
    """Return True if the draft of a failed update is quarantined, and no other one is to be trained."""
    return due is not None and due.trainer.state.quarantined is not None and not (due.trainer.member and trainers.all())


def _reason(error: Exception) -> str:
    if is_out_of_memory(error) and not isinstance(error, (ConfigError, RunError)):  # torch's text has many lines
        return f"out of memory; lower adapt.batch_tokens: {in_one_line(error)}"
    return str(error)


def _complain(message: str) -> None:
    with suppress(OSError):  # the disk may be what is full
        print(message, file=sys.stderr, flush=True)


def _is_quarantined(layout: Layout) -> bool:
    """Return True if no draft may be trained."""
    with closing(VersionRegistry(layout.versions)) as registry:
        return read_states(layout, registry.pool.learners()).quarantined is not None


def run_embedded(root: Path) -> int:
    """Run the embedded trainer of an online folder until it is told to stop. Return the exit code."""
    os.umask(OTHERS)  # its files hold text
    settings = read_settings(root)
    try:
        with listen_for_stop() as stop, open_tracking(settings, settings.layout.trainer) as tracking:
            run_trainer(settings, lambda: stop.requested, report=tracking.report, wait=tracking.wait)
    except (ConfigError, RunError) as error:
        _complain(str(error))
        if isinstance(error, Occupied):
            return OCCUPIED
        return QUARANTINED if _is_quarantined(settings.layout) else 1
    return 0
