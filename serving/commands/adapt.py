"""`distill adapt`: run the online trainer beside a server (online=decoupled), or once over a recorded log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import AdaptCommand
from distillspec.evaluation.states import TargetStates
from distillspec.models import load_target
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import CandidateJudge
from distillspec.serving.online.gate.shadow import Shadow
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import Layout, OnlineSettings, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.selection import offline_folder
from distillspec.serving.online.training.tracking import open_tracking
from distillspec.training.interrupts import listen_for_stop


def run(config: AdaptCommand, folder: Path) -> None:
    """Train until a signal or `max_updates`, or with `once` for one update. Candidates go to the registry."""
    settings = OnlineSettings.of(config)
    ReplayLog(settings.layout.replay).close()  # no log, no run
    offline_folder(settings.adapt)
    open_run(folder, config)
    _lift_quarantine(settings.layout)
    with listen_for_stop() as stop, open_tracking(settings, folder) as tracking:
        made = run_trainer(
            settings,
            lambda: stop.requested,
            report=tracking.report,
            once=config.once,
            max_updates=config.max_updates,
            wait=tracking.wait,
        )
        verdict = _judge(config, settings, tracking.report) if config.judge and made else None
    for version in made:
        print(f"candidate: {version.name}")
    if verdict is not None:
        print(f"{verdict['decision']}: {verdict['reason']}")
    close_run(folder, "adapt", {"versions": [version.name for version in made], "verdict": verdict})


def _judge(
    config: AdaptCommand, settings: OnlineSettings, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """Judge the newest candidate with a target loaded here. Return the verdict, None without enough answers."""
    target = load_target(config.target)
    replay, registry = ReplayLog(settings.layout.replay), VersionRegistry(settings.layout.versions)
    shadow = Shadow(target, TargetStates(target), config.gate.max_gamma)
    keeper = Gatekeeper(settings, registry, CandidateJudge(settings, registry, replay, shadow), report=report)
    verdict = keeper.judge_newest()
    if verdict is None:
        print(f"not judged: there are {keeper.waiting_for}")
    return None if verdict is None else verdict.to_json()


def _lift_quarantine(layout: Layout) -> None:
    """Lift a quarantine. An operator who starts a trainer has seen why it stopped."""
    state = TrainerState.read(layout.state)
    if state.quarantined:
        state.with_(quarantined=None, bad_updates=0, working=None).write(layout.state)
