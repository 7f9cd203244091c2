"""One draft that learns while an engine serves: its versions, its acceptance in service and its gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.known import known_costs
from distillspec.serving.engine import Engine
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.gate.pool_comparison import PoolComparison, lost_to_memory
from distillspec.serving.online.gate.step_costs import ServedLoad, step_costs
from distillspec.serving.online.judging.evidence import Costs
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import log_of
from distillspec.serving.online.pool.specialists import share_of
from distillspec.serving.online.reporting import Reporter
from distillspec.serving.online.state.events import Record
from distillspec.serving.online.state.layout import OnlineSettings, TrainerState
from distillspec.serving.online.state.pool import Member, Status
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version


class LearningDraft:
    """A server's only draft, or one of its pool. A specialist on trial is not in the engine yet.

    Args:
        registry, replay: of the folder. The draft takes its own part of them.
        load: of the engine's steps.
        at_cost: returns the share of the pool's tokens that one more draft costs.

    Raises:
        ConfigError: no version of it is promoted.
    """

    def __init__(
        self,
        member: Member,
        settings: OnlineSettings,
        engine: Engine,
        registry: VersionRegistry,
        replay: ReplayLog,
        scores: ScoreTable,
        load: ServedLoad,
        reporter: Reporter,
        at_cost: Callable[[], float],
    ) -> None:
        self.name, self.source = member.name, member.name or DRAFT
        self.registry = registry.of(member.name)
        self._member = member
        self._engine = engine
        self._reporter = reporter
        self._load = load
        self._settings = settings
        self._replay = replay
        self._at_cost = at_cost
        self.served = ServedAcceptance(settings.gate, self._alarm, self.source)
        # A clone's first version was served as its owner's.
        served_names = {v.served_as for v in self.registry.versions() if not member.cloned_from or v.metrics}
        self.served.restore([record for record in registry.served() if record.version in served_names])
        log = log_of(member.name, replay, registry)
        judge = Judge(settings, self.registry, log, scores, self._costs, self._compared)
        drafting = None if self.on_trial else engine.draft_versions.get(self.source)
        self.gatekeeper = Gatekeeper(
            settings, self.registry, judge, swap=self._swap, served=self.served, report=self._tell, drafting=drafting
        )
        current = self.registry.current()
        if current is None:
            raise ConfigError(f"no draft is promoted in {registry.folder}; call first_draft before")
        self.base = self.registry.promotions()[0]["version"]
        if self.on_trial and current.name != self.base:  # promoted just before a crash, or by hand
            self._set_status("serving", "promoted")

    @property
    def on_trial(self) -> bool:
        return self._member.status == "on trial"

    @property
    def serving(self) -> str | None:
        """Name of the version that the engine drafts with."""
        serving = self.gatekeeper.serving  # the gate's thread changes it
        return None if serving is None else serving.name

    @property
    def label(self) -> dict[str, str]:
        """Its name for a record, nothing for a server's only draft."""
        return {"draft": self.name} if self.name else {}

    @property
    def gained_tokens(self) -> float:
        """Tokens that it was accepted more than its first version would have been."""
        return self.served.accepted_gain(self.registry.get(self.base).served_as)

    def figures(self) -> dict[str, Any]:
        """Return its state as plain values."""
        suspicion = self.gatekeeper.suspicion  # the gate's thread changes it
        return {
            "serving": self.serving,
            "waiting_for": self.gatekeeper.waiting_for,
            "suspected": None if suspicion is None else suspicion.reason,
            "served": self.served.figures(),
            "gained_tokens": self.gained_tokens,
        }

    def of_pool(self) -> dict[str, Any]:
        """Return what the pool's list says of it, and why it is not trained any more, None for no reason."""
        member = self._member
        return {
            "status": member.status,
            "domain": member.domain,
            "cloned_from": member.cloned_from,
            "reason": member.reason,
            "quarantined": TrainerState.read(self._settings.layout.of(self.name).state).quarantined,
        }

    def withdraw(self, reason: str) -> None:
        """Mark it as withdrawn. `LearningPool.follow` drops it."""
        self._set_status("withdrawn", reason)

    def _costs(self) -> Costs:
        """Return the costs of a step with this draft, at the load that is served."""
        latency = known_costs(self._engine.controller)
        return step_costs(self._engine.target, self._drafting(), latency, self._load, self.source)

    def _drafting(self) -> LanguageModel:
        """Return its model in the engine. A specialist on trial is as large as the draft that it was cloned from.

        With all drafts unloaded by hand the target stands in: no candidate pays then.
        """
        drafts = self._engine.drafts
        names = (self.source, self._member.cloned_from or "", *drafts)
        return next((drafts[name] for name in names if name in drafts), self._engine.target)

    def _compared(self) -> PoolComparison | None:
        """Return what this specialist would bring the pool, None for a draft that serves: it takes its own place."""
        if not self.on_trial:
            return None
        room, latency = self._engine.room_for(self._drafting(), self.name), known_costs(self._engine.controller)
        seconds = None if latency is None else partial(self._load.step_s, latency)
        memory = lost_to_memory(self._load.rows, room.slots, seconds)
        return PoolComparison(share_of(self._member, self._replay), self._at_cost(), memory, room.problem)

    def _swap(self, version: Version, acceptance: float | None) -> None:
        """Load a version in this thread. The engine's next step drafts with it. A specialist serves from then on."""
        if self.on_trial and version.name == self.base:
            self._engine.at_next_step(self._drop_tried)
            return
        self._engine.load_draft(version.path, acceptance, name=self.name or None)
        current = self.registry.current()
        if current is not None and current.name == version.name:  # promoted or rolled back by another process
            self._follow(version.name)
        self._tell({"event": "swap", "version": version.name, "served_as": version.served_as})

    def _drop_tried(self) -> None:
        """Take a version that was tried by hand out of the engine. A specialist on trial has no other one there."""
        if self.on_trial and self.source in self._engine.drafts:
            self._engine.unload_draft(self.source)

    def _tell(self, record: Record) -> None:
        if record["event"] == "rollback":
            self._follow(record["to"])
        elif record["event"] == "promotion" or record.get("decision") == "promoted":
            self._follow(record.get("version") or record["candidate"])
        self._reporter.tell({**record, **self.label})

    def _follow(self, version: str) -> None:
        """Let a specialist serve from its first promotion on, and withdraw one that goes back to what it began as."""
        if self._member.cloned_from is not None and version == self.base:
            self.withdraw("rolled back to the draft that it was cloned from")
        elif self.on_trial:
            self._set_status("serving", f"{version} is promoted")

    def _alarm(self, message: str) -> None:
        self._reporter.alarm(f"{self.name}: {message}" if self.name else message)

    def _set_status(self, status: Status, reason: str) -> None:
        pool = self.registry.pool
        pool.set_status(self.name, status, reason)
        self._member = next(member for member in pool.members() if member.name == self.name)
