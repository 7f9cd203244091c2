"""The online trainer: reads the log, decides when to learn, and leaves candidates in the registry.

It meets the server in files alone. Killed at any point it costs the update under way; a candidate is complete before
it is visible, and the place in the log is written after it.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch

from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, load_draft, save_draft
from distillspec.models.checkpoint import TargetRecord, recorded_target
from distillspec.serving.online.drift import DriftDetector
from distillspec.serving.online.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.learning import Learnt, Lesson, learn, lesson_of
from distillspec.serving.online.registry import Version, VersionRegistry
from distillspec.serving.online.replay_log import Entry, ReplayLog
from distillspec.serving.online.selection import Selection, newest_that_fit, offline_samples, select

log = logging.getLogger(__name__)

LOOK_BACK = 1024  # answers; the drift detector's long average has forgotten what came before them
OLD_ANSWERS = 4096  # old answers among which an update's share of them is drawn
Report = Callable[[dict[str, Any]], None]


class OnlineTrainer:
    """One trainer over one online folder.

    Args:
        report: told the figures of every update.
        on_stage: told what it begins: waiting, selecting, loading, learning, saving, registering.

    Raises:
        ConfigError: there is no log, or no draft is promoted yet.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        *,
        report: Report | None = None,
        on_stage: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.config, self.layout = settings, settings.adapt, settings.layout
        self.replay = ReplayLog(self.layout.replay)
        self.registry = VersionRegistry(self.layout.versions)
        self.report = report or (lambda record: None)
        self._on_stage, self._clock = on_stage or (lambda stage: None), clock
        self.state = TrainerState.read(self.layout.state).with_(pid=os.getpid())
        self.control = TrainerControl.read(self.layout.control)
        self.drift = DriftDetector(self.config.drift_drop)
        self._followed = self._look_back()  # the last answer that the drift detector has seen
        self._drifted = False
        self._since_s = self._waiting_since()
        self._offline: list | None = None

    def due(self) -> str | None:
        """Why an update is to be made now; None where it is not."""
        self.control = TrainerControl.read(self.layout.control)
        new = self._new_entries()
        self._follow()
        if not new or self.control.paused:
            return None
        if self.control.asked > self.state.asked:
            return "asked"
        if len(new) < self.config.min_requests or (self.config.idle_only and not self.control.idle):
            return None
        if self.config.every_requests is not None and len(new) >= self.config.every_requests:
            return "requests"
        if self.config.every_s is not None and self._clock() - self._since_s >= self.config.every_s:
            return "time"
        return "drift" if self.config.on_drift and self._drifted else None

    def update(self, reason: str) -> Version | None:
        """Learn once; the new candidate, or None where the numbers were not finite.

        Raises:
            RunError: so many updates in a row failed that the trainer stops for good (`state.quarantined`); or a tenant
                was deleted that it learnt from.
            ConfigError: the log and the draft do not go together.
        """
        began_s = self._clock()
        self._stage("selecting")
        up_to = self.replay.newest_number()
        chosen, skipped = self._select(self._new_entries(up_to))
        self._stage("loading")
        parent = self._parent()
        draft, promoted = self._load(parent), self._anchor()
        lessons = self._lessons(chosen)
        self._stage("learning")
        learnt = self._learn(draft, lessons, promoted)
        version = None if learnt.problem else self._save(draft, parent, chosen, learnt, reason)
        self._remember(up_to, learnt, version, chosen, skipped)
        self._drifted, self._since_s = False, began_s
        self.drift.restart()
        self._tell(reason, chosen, learnt, version)
        self._judge_itself(learnt)
        self._stage("waiting")
        return version

    def _select(self, new: Sequence[Entry]) -> tuple[Selection, int]:
        """The update's entries: of new ones the newest that it has time for, and how many were too many."""
        config = self.config
        room = config.max_steps * config.batch_tokens / config.epochs
        if config.mode == "replay":
            room *= 1 - config.replay_share - config.offline_share
        kept = newest_that_fit(new, room)
        old = self._old_entries(kept[0].number - 1 if kept else 0)
        if self._offline is None:
            made_for = self._target().identity
            self._offline = offline_samples(config, made_for, self.replay.key.entries)
        seed = self.settings.seed + self.state.updates
        return select(kept, old, self._offline, config, seed), len(new) - len(kept)

    def _old_entries(self, up_to: int) -> list[Entry]:
        if self.config.mode == "flush" or self.config.replay_share == 0:
            return []
        old = self.replay.entries(up_to=up_to, split="train")
        if len(old) <= OLD_ANSWERS:
            return old
        rng = random.Random(self.settings.seed + self.state.updates)
        return sorted(rng.sample(old, OLD_ANSWERS), key=lambda entry: entry.number)

    def _new_entries(self, up_to: int | None = None) -> list[Entry]:
        return self.replay.entries(after=self.state.cursor, up_to=up_to, split="train")

    def _waiting_since(self) -> float:
        """When the oldest new answer was logged, by the trainer's own clock; now if there is none.

        The process starts only when there is text to learn from: that text has waited already.
        """
        new = self._new_entries()
        return self._clock() - (self.replay.clock() - new[0].time_s if new else 0.0)

    def _look_back(self) -> int:
        """Show the drift detector what it saw until the last update, which answered it."""
        seen = self.replay.entries(after=max(0, self.state.cursor - LOOK_BACK), up_to=self.state.cursor)
        for entry in seen:
            self._show(entry)
        self.drift.restart()
        return self.state.cursor

    def _follow(self) -> None:
        """Show the drift detector what came since; held-out answers count, nothing is learnt here."""
        for entry in self.replay.entries(after=self._followed):
            self._drifted |= self._show(entry)
            self._followed = entry.number

    def _show(self, entry: Entry) -> bool:
        cluster = entry.tenant if self.config.drift_by == "tenant" else entry.domain
        return self.drift.add(cluster, entry.tried, entry.accepted)

    def _lessons(self, chosen: Selection) -> list[Lesson]:
        answers = self.replay.load([*chosen.new, *chosen.old])
        if not answers:
            raise RunError("the chosen answers are gone from the log; nothing is learnt")
        lessons = [lesson_of(answer, self.config, chosen.weights[answer.tenant]) for answer in answers]
        return lessons + [Lesson(sample, torch.ones(len(sample.response_ids))) for sample in chosen.offline]

    def _parent(self) -> Version:
        """Go on from the last candidate while it descends from what serves and is not refused; else from that.

        Small gains must add up: a candidate that the gate could not tell from its parent is a good beginning.
        """
        current = self._current()
        name = self.state.working
        if name is None:
            return current
        working = self.registry.get(name)
        usable = self._descends(working, current) and self.registry.problem_of(working) is None
        return working if usable else current

    def _descends(self, working: Version, current: Version) -> bool:
        """Whether every step from `current` to `working` may still turn out well: none was refused or taken back."""
        line = [working, *self.registry.lineage(working)]
        since = list(takewhile(lambda version: version.name != current.name, line))
        return len(since) < len(line) and all(version.status in ("candidate", "inconclusive") for version in since)

    def _current(self) -> Version:
        current = self.registry.current()
        if current is None:
            raise ConfigError(
                f"no draft is promoted in {self.layout.versions}; start the server with its draft first, or "
                "distill versions action=promote"
            )
        return current

    def _load(self, version: Version) -> LanguageModel:
        if problem := self.registry.problem_of(version):
            raise RunError(f"{version.name} cannot be trained on: {problem}")
        draft = load_draft(version.path)
        key = self.replay.key
        if draft.identity.tokenizer_hash != key.tokenizer_hash:
            raise ConfigError(
                f"the draft {version.name} and the log in {self.layout.replay} have different tokenizers "
                f"({draft.identity.tokenizer_hash}, {key.tokenizer_hash})"
            )
        if self._target().identity.weights_hash not in ("", key.weights_hash):
            raise ConfigError(f"the draft {version.name} was made for another target than the log's")
        draft.model.to(self.config.device)
        return draft

    def _anchor(self) -> LanguageModel | None:
        return self._load(self._current()) if self.config.anchor > 0 else None

    def _learn(self, draft: LanguageModel, lessons: list[Lesson], anchor: LanguageModel | None) -> Learnt:
        seed = self.settings.seed + self.state.updates
        return learn(
            draft,
            lessons,
            self.config,
            self.settings.loss,
            anchor=anchor,
            seed=seed,
            on_step=lambda step: self._on_stage("learning") if step else None,
        )

    def _save(self, draft: LanguageModel, parent: Version, chosen: Selection, learnt: Learnt, reason: str) -> Version:
        self._stage("saving")
        numbers = [entry.number for entry in (*chosen.old, *chosen.new)]
        trained = {"update": self.state.updates, "reason": reason, "parent": parent.name, **learnt.to_json()}
        draft.model.to("cpu")

        def write(folder: Any) -> None:
            save_draft(draft, folder, self._target(), {"online": trained})
            self._stage("registering")

        requests = min(numbers), max(numbers)
        with self.replay.still_there([*chosen.old, *chosen.new]):
            return self.registry.add(write, parent=parent.name, requests=requests, metrics=trained)

    def _target(self) -> TargetRecord:
        return recorded_target(self._current().path)

    def _remember(self, up_to: int, learnt: Learnt, version: Version | None, chosen: Selection, skipped: int) -> None:
        state = self.state
        self.state = state.with_(
            cursor=up_to,
            asked=self.control.asked,
            updates=state.updates + 1,
            bad_updates=0 if version is not None else state.bad_updates + 1,
            learnt=state.learnt + len(chosen.new),
            skipped=state.skipped + skipped,
            capped=state.capped + chosen.capped,
            cpu_s=state.cpu_s + learnt.cpu_s,
            seconds=state.seconds + learnt.seconds,
            working=version.name if version is not None else None,
            last=learnt.to_json(),
        )
        self.state.write(self.layout.state)

    def _tell(self, reason: str, chosen: Selection, learnt: Learnt, version: Version | None) -> None:
        record = {
            "event": "update",
            "step": self.state.updates,
            "reason": reason,
            "version": version.name if version is not None else None,
            "new": len(chosen.new),
            "old": len(chosen.old),
            "offline": len(chosen.offline),
            "drop_rate": self.state.drop_rate,
            **learnt.to_json(),
        }
        record |= {f"replay_{name}": value for name, value in self.replay.sizes().items()}
        self.report(record)
        log.info("update %d (%s): %s", self.state.updates, reason, learnt.problem or record["version"])

    def _judge_itself(self, learnt: Learnt) -> None:
        if self.state.bad_updates < self.config.max_bad_updates:
            return
        problem = f"{self.state.bad_updates} updates in a row gave no finite draft: {learnt.problem}"
        self.state = self.state.with_(quarantined=problem)
        self.state.write(self.layout.state)
        raise RunError(f"the online trainer is quarantined: {problem}")

    def _stage(self, stage: str) -> None:
        drift = {name or "all": list(pair) for name, pair in self.drift.averages().items()}
        self.state = self.state.with_(stage=stage, drift=drift)
        self.state.write(self.layout.state)
        self._on_stage(stage)
