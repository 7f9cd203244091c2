"""All drafts that learn while an engine serves: a server's only one, or those of its pool with their specialists."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from distillspec.errors import ConfigError, RunError
from distillspec.serving.base.locked import one_at_a_time
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.engine import Engine
from distillspec.serving.online.gate.step_costs import ServedLoad
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.learning_draft import LearningDraft
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.specialists import COST_OF_A_DRAFT, Specialists, cost_of_a_draft
from distillspec.serving.online.reporting import Reporter
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.step.commit import Emission

log = logging.getLogger(__name__)

CLONE_AGAIN_S = 600  # after a clone that failed


class LearningPool:
    """The drafts, each with its own versions and its own gate.

    The engine's thread counts (`watch`, `take`, `finish`), the gate's thread judges, and a third adds and withdraws
    drafts. The list of drafts is changed by one thread at a time.

    Raises:
        ConfigError: no version of a draft is promoted.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        engine: Engine,
        registry: VersionRegistry,
        replay: ReplayLog,
        reporter: Reporter,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._registry = registry
        self._replay = replay
        self._reporter = reporter
        self._load = ServedLoad()
        self._scores = ScoreTable(settings.layout.scores)
        self._specialists = Specialists(settings, replay, registry, reporter.tell, self._no_room)
        self._clone_at_s = 0.0  # no clone is tried before
        self._drafts: dict[str, LearningDraft] = {}
        self.lock = threading.RLock()
        self.follow()

    @property
    def first(self) -> LearningDraft:
        """The only draft, or the pool's first."""
        return next(iter(self._drafts.values()))

    @property
    def has_several(self) -> bool:
        """True for a pool, however many drafts it has now."""
        return bool(self.first.name)

    def drafts(self) -> list[LearningDraft]:
        """Return the drafts of now."""
        return list(self._drafts.values())

    def of(self, version: str) -> LearningDraft:
        """Return the draft that a version is of.

        Raises:
            ConfigError: there is no such version, or its draft was withdrawn.
        """
        return self.named(self._registry.get(version).member)

    def named(self, name: str) -> LearningDraft:
        """Return a draft by its name.

        Raises:
            ConfigError: none of this name learns.
        """
        if name not in self._drafts:
            there = f"there are {', '.join(self._drafts)}" if self.has_several else "there is one, without a name"
            raise ConfigError(f"no draft {name!r} learns here; {there}")
        return self._drafts[name]

    def watch(self, emissions: Sequence[Emission]) -> None:
        """Count a step's accepted and rejected tokens."""
        for draft in self.drafts():
            draft.served.watch(emissions)

    def take(self, result: StepResult) -> None:
        """Count a step's load."""
        self._load.add(result)

    def finish(self, outputs: Sequence[RequestOutput]) -> None:
        """Count requests that ended."""
        for draft in self.drafts():
            draft.served.finish(outputs)

    def judge(self) -> None:
        """Let every gate do what is due. One that fails stops no other: the first error is raised at the end."""
        errors: list[Exception] = []
        for draft in self.drafts():
            try:
                draft.gatekeeper.work()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def suspects(self) -> frozenset[str]:
        """Versions in service that are suspected."""
        suspicions = [draft.gatekeeper.suspicion for draft in self.drafts()]
        return frozenset([suspicion.version.name for suspicion in suspicions if suspicion is not None])

    @one_at_a_time
    def keep_specialists(self) -> None:
        """Withdraw specialists that learn nothing, and clone one where a domain needs it."""
        for name, reason in self._specialists.fruitless():
            self._drafts[name].withdraw(reason)
            self._reporter.tell({"event": "withdrawal", "draft": name, "reason": reason})
        if time.monotonic() < self._clone_at_s:
            return
        try:
            self._specialists.clone()
        except (OSError, RunError) as error:  # a full disk, above all
            log.error("no specialist is cloned, and none for %d s: %s", CLONE_AGAIN_S, error)
            self._clone_at_s = time.monotonic() + CLONE_AGAIN_S

    @one_at_a_time
    def follow(self) -> None:
        """Take up the drafts that the registry lists. Of a pool, drop those that are withdrawn, from the engine too."""
        parts = (self._settings, self._engine, self._registry, self._replay, self._scores, self._load, self._reporter)
        members = self._registry.pool.learning()
        for member in members:
            if member.name not in self._drafts:
                self._drafts[member.name] = LearningDraft(member, *parts, self._cost_of_a_draft)
        names = {member.name for member in members}
        for name in set(self._drafts) - names:
            del self._drafts[name]
        for name in set(self._engine.drafts) - names if self.has_several else ():
            self._engine.unload_draft(name)

    def newest_scored(self) -> int:
        """Return the highest number of an answer that any version was scored on, 0 without one."""
        return self._scores.newest_answer()

    def keep_served(self) -> None:
        """Store acceptance in service for the next start."""
        for draft in self.drafts():
            self._registry.keep_served(draft.served.take_changed())

    def verdicts(self) -> list[dict[str, Any]]:
        """Return name, status, reason and verdict of every judged version, oldest first."""
        return [
            {"version": v.name, "status": v.status, "reason": v.reason, **draft.label, **v.verdict}
            for draft in self.drafts()
            for v in draft.registry.versions()
            if v.verdict or v.reason
        ]

    def figures(self) -> dict[str, Any]:
        """Return the first draft's figures, those of each of several as `drafts`, and tokens gained by all."""
        drafts = self.drafts()
        by_draft = [draft.figures() for draft in drafts]
        gained = sum(figures["gained_tokens"] for figures in by_draft)
        by_name = {draft.name: {**draft.of_pool(), **figures} for draft, figures in zip(drafts, by_draft, strict=True)}
        return {**by_draft[0], "gained_tokens": gained, **({"drafts": by_name} if drafts[0].name else {})}

    def close(self) -> None:
        self._scores.close()

    def _no_room(self, owner: str, name: str) -> str | None:
        """Return why a clone of a draft does not fit into the engine's memory, None if it does."""
        drafts = self._engine.drafts
        return self._engine.room_for(drafts[owner], name).problem if owner in drafts else None

    def _cost_of_a_draft(self) -> float:
        chosen = selecting(self._engine.controller)
        return COST_OF_A_DRAFT if chosen is None else cost_of_a_draft(chosen.figures, len(self._engine.drafts))
