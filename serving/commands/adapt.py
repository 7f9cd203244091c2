"""`distill adapt`: run the online trainer beside a server (online=decoupled), or once over a recorded log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import AdaptCommand
from distillspec.models import load_draft, load_target
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.step_costs import step_costs
from distillspec.serving.online.judging.evidence import Costs
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import log_of
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import OnlineSettings, lift_quarantine
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.selection import offline_folder
from distillspec.serving.online.training.tracking import open_tracking
from distillspec.training.interrupts import listen_for_stop


def run(config: AdaptCommand, folder: Path) -> None:
    """Train until a signal or `max_updates`, or with `once` for one update. Candidates go to the registry."""
    settings = OnlineSettings.of(config)
    settings.layout.check_usable()
    ReplayLog(settings.layout.replay).close()  # no log, no run
    offline_folder(settings.adapt)
    open_run(folder, config)
    with closing(VersionRegistry(settings.layout.versions)) as registry:
        lift_quarantine(settings.layout, registry.pool.learners())
    with listen_for_stop() as stop, open_tracking(settings, folder) as tracking:
        candidates = run_trainer(
            settings,
            lambda: stop.requested,
            report=tracking.report,
            once=config.once,
            judged=config.judge,
            without=config.retrain_without,
            max_updates=config.max_updates,
            wait=tracking.wait,
        )
        verdict = _judge(config, settings, tracking.report) if config.judge and candidates else None
    for version in candidates:
        print(f"candidate: {version.name}")
    if verdict is not None:
        print(f"{verdict['decision']}: {verdict['reason']}")
    close_run(folder, "adapt", {"versions": [version.name for version in candidates], "verdict": verdict})


def _judge(config: AdaptCommand, settings: OnlineSettings, report: Report) -> dict[str, Any] | None:
    """Judge the newest candidate of each draft by its scores. Return the last verdict, None without enough answers."""
    replay, registry = ReplayLog(settings.layout.replay), VersionRegistry(settings.layout.versions)
    target, last_verdict = load_target(config.target), None
    for member in registry.pool.learners():
        member_registry = registry.of(member)
        if not member_registry.versions("candidate"):
            continue

        def costs(member_registry: VersionRegistry = member_registry) -> Costs:
            serving = member_registry.current()
            assert serving is not None, "there is a candidate, so a version serves"
            return step_costs(target, load_draft(serving.path, target))

        log, scores = log_of(member, replay, registry), ScoreTable(settings.layout.scores)
        judge = Judge(settings, member_registry, log, scores, costs)
        keeper = Gatekeeper(settings, member_registry, judge, report=report)
        verdict = keeper.judge_newest(final=True)
        if verdict is None:
            print(f"{_of(member)}not judged: there are {keeper.waiting_for}")
        else:
            last_verdict = verdict.to_json()
    return last_verdict


def _of(member: str) -> str:
    return f"{member}: " if member else ""
