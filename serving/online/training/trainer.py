"""Online trainer: reads the log, decides when an update is due, and registers candidates.

It shares only files with the server. A kill costs the running update: a candidate is complete before it is visible, and
the cursor in the log is written after it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distillspec.data.trained_prompts import with_trained_prompts
from distillspec.errors import RunError
from distillspec.models import LanguageModel, save_draft
from distillspec.models.checkpoint import SERVED
from distillspec.serving.online.judging.question import candidate_question
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import log_of
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import ONLY, Version
from distillspec.serving.online.training.base_drafts import BaseDrafts
from distillspec.serving.online.training.drift import DriftWatch
from distillspec.serving.online.training.examples import examples_of
from distillspec.serving.online.training.learning import UpdateResult, learn
from distillspec.serving.online.training.loaded_target import LoadedTarget
from distillspec.serving.online.training.memory import MemoryFile
from distillspec.serving.online.training.patience import every_requests
from distillspec.serving.online.training.scoring import Scorer
from distillspec.serving.online.training.selection import (
    Selection,
    newest_that_fit,
    offline_samples,
    old_entries,
    select,
)
from distillspec.serving.online.training.vocabulary import ceilings

log = logging.getLogger(__name__)

DUE = ("requests", "time", "drift")  # reasons of updates that nobody asked for


class Overtaken(Exception):
    """An update ends: a version in service is suspected, and to be judged first."""


class OnlineTrainer:
    """Trainer of one draft over an online folder.

    Args:
        member: the draft of a pool that it trains.
        target: shared by the trainers of several drafts.
        report: takes the figures of every update.
        on_stage: takes each stage as it begins: waiting, judging, selecting, loading, learning, saving, registering.

    Raises:
        ConfigError: there is no log, or no draft is promoted yet.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        *,
        member: str = ONLY,
        target: LoadedTarget | None = None,
        report: Report | None = None,
        on_stage: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.config = settings.adapt
        self.layout = settings.layout.of(member)
        self.member, self.registry = member, VersionRegistry(self.layout.versions).of(member)
        self.replay = log_of(member, ReplayLog(self.layout.replay), self.registry)
        self._drafts = BaseDrafts(self.registry, self.replay, target or LoadedTarget.of(settings, self.replay.key))
        self.report = report or (lambda record: None)
        self._on_stage, self._clock = on_stage or (lambda stage: None), clock
        self.state = TrainerState.read(self.layout.state).with_(pid=os.getpid())
        self.control = TrainerControl.read(self.layout.control)
        table = ScoreTable(self.layout.scores)
        self.scorer = Scorer(settings.gate, self.replay, self.registry, table, self._drafts, clock)
        self._memory = MemoryFile(self.layout.memory)
        self.drift = DriftWatch(self.config, self.replay, self.state.cursor)
        self._since_s = self._waiting_since()
        self._offline: list | None = None

    def judge(self) -> bool:
        """Score a few answers for the gate. Return False if nothing is to be scored now."""
        began_s = time.process_time()
        self.control = TrainerControl.read(self.layout.control)
        if self.control.paused or not self.scorer.work(self.control.suspected):
            if self.state.stage == "judging":
                self._stage("waiting")
            return False
        self.state = self.state.with_(judging_cpu_s=self.state.judging_cpu_s + time.process_time() - began_s)
        self._stage("judging")
        return True

    def due(self) -> str | None:
        """Return why an update is due now, or None. While a suspicion is urgent, only one asked for by hand is."""
        self.control = TrainerControl.read(self.layout.control)
        new = self._new_entries()
        self.drift.follow()
        if not new or self.control.paused:
            return None
        if self.control.asked > self.state.asked:
            return "asked"
        if self._is_urgent(self.control) or len(new) < self.config.min_requests:
            return None
        if not self._waits_for_verdict():
            every = self.config.every_requests
            if every is not None and len(new) >= every_requests(every, self.registry.judged_in_vain()):
                return "requests"
            if self.config.every_s is not None and self._clock() - self._since_s >= self.config.every_s:
                return "time"
        return "drift" if self.config.on_drift and self.drift.drifted else None

    def _waits_for_verdict(self) -> bool:
        """Return True while the gate may still decide on the last candidate: the next one goes on from it."""
        question = candidate_question(self.registry)
        if question is None or self.scorer.is_stuck(question):
            return False
        most = self.settings.gate.requests
        unseen = question.unseen(self.replay, most)
        return len({entry.conversation for entry in unseen}) < most

    def update(self, reason: str, held_back: int = 0) -> Version | None:
        """Make one update. Return the new candidate, or None if training gave non-finite values.

        Args:
            held_back: newest answers that are not learnt from yet, so that the candidate can be judged by them.

        Raises:
            RunError: too many updates failed in a row and the trainer is quarantined (`state.quarantined`), or a tenant
                whose answers it learnt from was deleted during the update.
            ConfigError: the log and the draft do not fit.
            Overtaken: by an update that was due by itself. What it would have learnt from waits for the next one.
        """
        began_s, began_cpu_s = self._clock(), time.process_time()
        self._stage("selecting")
        new = self._new_entries(self.replay.newest_number())
        new = new[: len(new) - held_back]
        up_to = new[-1].number if new else self.state.cursor
        chosen, skipped = self._select(new)
        self._stage("loading")
        parent = self.parent()
        memory = self._memory.read(parent.name)
        examples = examples_of(chosen, self.replay.load(chosen.logged), self.config)
        draft, rows = self._drafts.renewed(self._drafts.load(parent), examples, self.config.vocabulary)
        self._stage("learning")
        try:
            result, memory = learn(
                draft,
                examples,
                self.config,
                self.settings.loss,
                memory=memory and replace(memory, rows=rows),
                states=self._drafts.states_for(draft),
                seed=self.settings.seed + self.state.updates,
                on_step=partial(self._before_step, chosen.logged, reason in DUE),
            )
        except (Overtaken, RunError):
            self._stage("waiting")
            raise
        draft = with_trained_prompts(draft, [example.sample.prompt_ids for example in examples if example.is_text])
        reach = ceilings(examples, draft.kept_ids)
        result = replace(result, new_ids=rows.new if rows is not None else 0, ceiling=reach)
        version = None if result.problem else self._save(draft, parent, chosen, result, reason)
        self._remember(up_to, result, version, chosen, skipped, time.process_time() - began_cpu_s)
        if version is not None and memory is not None:
            self._memory.write(version.name, memory)
        self._since_s = began_s
        self.drift.restart()
        self._tell(reason, chosen, result, version, began_s)
        self._quarantine_if_failing(result)
        self._stage("waiting")
        return version

    def _select(self, new: Sequence[LogEntry]) -> tuple[Selection, int]:
        """Select the update's text. Return it with the number of new answers that there was no time for."""
        config = self.config
        room = config.max_steps * config.batch_tokens / config.epochs
        if config.mode == "replay":
            room *= 1 - config.replay_share - config.offline_share
        kept = newest_that_fit(new, room)
        seed = self.settings.seed + self.state.updates
        old = old_entries(self.replay, kept[0].number - 1 if kept else 0, config, seed)
        if self._offline is None:
            target = self._drafts.target().identity
            self._offline = offline_samples(config, target, self.replay.key.entries)
        return select(kept, old, self._offline, config, seed), len(new) - len(kept)

    def _new_entries(self, up_to: int | None = None) -> list[LogEntry]:
        return self.replay.entries(after=self.state.cursor, up_to=up_to)

    def _waiting_since(self) -> float:
        """Return when the oldest new answer was logged, by the trainer's own clock. Without one: now.

        The process starts only when there is text to learn from, and that text has waited already.
        """
        new = self._new_entries()
        return self._clock() - (self.replay.clock() - new[0].time_s if new else 0.0)

    def parent(self) -> Version:
        """Return the version to train on. See `BaseDrafts.parent`."""
        return self._drafts.parent(self.state.working)

    def _before_step(self, learnt: Sequence[LogEntry], may_end: bool, step: int) -> None:
        if step:
            self._on_stage("learning")
        self.replay.check_there(learnt)
        if may_end and self._is_urgent(TrainerControl.read(self.layout.control)):
            raise Overtaken

    def _is_urgent(self, control: TrainerControl) -> bool:
        """Return True while a suspicion goes before updates."""
        return self.replay.clock() < control.urgent_until_s

    def _save(
        self, draft: LanguageModel, parent: Version, chosen: Selection, result: UpdateResult, reason: str
    ) -> Version:
        self._stage("saving")
        numbers = [entry.number for entry in chosen.logged]
        trained = {"update": self.state.updates, "reason": reason, "parent": parent.name, **result.to_json()}
        draft.model.to("cpu")

        def write(folder: Any) -> None:
            save_draft(draft, folder, self._drafts.made_for(), {"online": trained}, dtype=SERVED)
            self._stage("registering")

        requests = min(numbers), max(numbers)
        with self.replay.still_there(chosen.logged):
            return self.registry.add(write, parent=parent.name, requests=requests, metrics=trained)

    def _remember(
        self, up_to: int, result: UpdateResult, version: Version | None, chosen: Selection, skipped: int, cpu_s: float
    ) -> None:
        state = self.state
        self.state = state.with_(
            cursor=up_to,
            asked=self.control.asked,
            updates=state.updates + 1,
            bad_updates=0 if version is not None else state.bad_updates + 1,
            learnt=state.learnt + len(chosen.new),
            skipped=state.skipped + skipped,
            capped=state.capped + chosen.capped,
            cpu_s=state.cpu_s + result.cpu_s,
            loading_cpu_s=state.loading_cpu_s + cpu_s - result.cpu_s,
            seconds=state.seconds + result.seconds,
            working=version.name if version is not None else None,
        )
        self.state.write(self.layout.state)

    def _tell(
        self, reason: str, chosen: Selection, result: UpdateResult, version: Version | None, began_s: float
    ) -> None:
        """Report the update with the times of its begin and end, in seconds since the epoch."""
        now_s = self.replay.clock()
        record = {
            "event": "update",
            "time_s": now_s,
            "began_s": now_s - (self._clock() - began_s),
            **({"draft": self.member} if self.member else {}),
            "step": self.state.updates,
            "reason": reason,
            "version": version.name if version is not None else None,
            "new": len(chosen.new),
            "old": len(chosen.old),
            "offline": len(chosen.offline),
            "drop_rate": self.state.drop_rate,
            **result.to_json(),
        }
        record |= {f"replay_{name}": value for name, value in self.replay.sizes().items()}
        self.report(record)
        log.info("update %d (%s): %s", self.state.updates, reason, result.problem or record["version"])

    def _quarantine_if_failing(self, result: UpdateResult) -> None:
        if self.state.bad_updates < self.config.max_bad_updates:
            return
        problem = f"{self.state.bad_updates} updates in a row gave no finite draft: {result.problem}"
        self.state = self.state.with_(quarantined=problem)
        self.state.write(self.layout.state)
        raise RunError(f"the online trainer is quarantined: {problem}")

    def _stage(self, stage: str) -> None:
        drift = {name or "all": list(pair) for name, pair in self.drift.detector.averages().items()}
        self.state = self.state.with_(stage=stage, drift=drift)
        self.state.write(self.layout.state)
        self._on_stage(stage)
