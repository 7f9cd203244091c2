"""Quick updates and filled logs for the trainer's tests."""

from __future__ import annotations

from dataclasses import replace

from distillspec.config import AdaptConfig
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings

from ..conftest import Answer

QUICK = {"max_steps": 3, "epochs": 1, "min_requests": 4, "on_drift": False}


def changed(settings: OnlineSettings, **adapt: object) -> OnlineSettings:
    return replace(settings, adapt=AdaptConfig(**{**QUICK, **adapt}))  # type: ignore[arg-type]


def fill(replay: ReplayLog, answer: Answer, count: int, start: int = 0, **extra: object) -> None:
    replay.append([answer(f"r{start + i}", **extra) for i in range(count)])
