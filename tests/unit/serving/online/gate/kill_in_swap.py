"""Run by a test in a process of its own: a server is killed at each point of letting a candidate in.

Every server is a fork of a process that has loaded everything and has not run a model itself. After each death it is
printed which version the next start would serve.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, EngineSettings
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.judging.evidence import Costs
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.process import read_settings

PLACES = ("loaded", "promoting", "promoted", None)


def main(root: Path) -> None:
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    for deadly in PLACES:
        child = os.fork()
        if child == 0:
            _serve(root, deadly, target)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        booted = VersionRegistry(read_settings(root).layout.versions).boot()
        end = "killed" if killed else os.waitstatus_to_exitcode(status)
        print("server:", deadly, end, booted.name if booted is not None else None, flush=True)


def _serve(root: Path, deadly: str | None, target: LanguageModel) -> None:
    def reached(place: str) -> None:
        if place == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        keeper = _gatekeeper(root, target, reached)
        keeper.judge_newest()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _gatekeeper(root: Path, target: LanguageModel, reached: Callable[[str], None]) -> Gatekeeper:
    """One that tells where it has come to."""
    settings = read_settings(root)

    def now_s() -> float:
        reached("promoting")  # the registry reads the clock within the transaction of a promotion
        return time.time()

    registry = VersionRegistry(settings.layout.versions, clock=now_s)
    serving = registry.boot()
    assert serving is not None
    draft = load_pretrained(str(serving.path), target, target.dtype)
    engine = Engine(target, draft, EngineSettings(max_slots=1, max_model_len=64, compile=False, measure_costs_s=0))
    judged = registry.judged

    def swap(version: Version, acceptance: float | None) -> None:
        engine.load_draft(version.path, acceptance)
        reached("loaded")

    def recording(*words: Any) -> None:
        reached("promoted")
        judged(*words)

    registry.judged = recording  # type: ignore[method-assign]
    table = ScoreTable(settings.layout.scores)
    judge = Judge(settings, registry, ReplayLog(settings.layout.replay), table, lambda: Costs(draft=0.1, verify=0.05))
    return Gatekeeper(settings, registry, judge, swap=swap)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
