"""The trainers of one process: one for each draft that learns, by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import OnlineSettings, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.loaded_target import LoadedTarget
from distillspec.serving.online.training.trainer import OnlineTrainer


class Due(NamedTuple):
    """An update that is due."""

    trainer: OnlineTrainer
    reason: str


class Trainers:
    """Makes a trainer for each draft as the registry lists it. The trainer that was at work last comes last.

    In a pool, a quarantined trainer is left out until that is lifted.

    Args:
        report, on_stage: see `OnlineTrainer`.

    Raises:
        ConfigError: there is no log, or no draft is promoted yet.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        report: Report | None = None,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._report = report
        self._on_stage = on_stage
        self._pool = VersionRegistry(settings.layout.versions).pool
        self._target = LoadedTarget.of(settings, ReplayLog(settings.layout.replay).key)
        self._trainers: dict[str, OnlineTrainer] = {}
        self.all()

    def all(self) -> list[OnlineTrainer]:
        """Return the trainers of now, the one whose turn it is first."""
        learning = [name for name in self._pool.learners() if not (name and self._is_quarantined(name))]
        kept = {name: trainer for name, trainer in self._trainers.items() if name in learning}
        self._trainers = kept | {name: self._made(name) for name in learning if name not in kept}
        return list(self._trainers.values())

    def with_text(self) -> list[OnlineTrainer]:
        """Return those with answers to learn from, or the first if none has any."""
        trainers = self.all()
        return [trainer for trainer in trainers if trainer.replay.count(after=trainer.state.cursor)] or trainers[:1]

    def judge(self) -> bool:
        """Score a few answers for a gate. Return False if nothing is to be scored now."""
        return any(trainer.judge() for trainer in self.all())

    def due(self) -> Due | None:
        """Return the next update that is due, None for none."""
        for trainer in self.all():
            if (reason := trainer.due()) is not None:
                self._trainers[trainer.member] = self._trainers.pop(trainer.member)  # to the end
                return Due(trainer, reason)
        return None

    def _made(self, member: str) -> OnlineTrainer:
        return OnlineTrainer(
            self._settings, member=member, target=self._target, report=self._report, on_stage=self._on_stage
        )

    def _is_quarantined(self, member: str) -> bool:
        return TrainerState.read(self._settings.layout.of(member).state).quarantined is not None
