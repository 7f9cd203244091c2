"""Arms of the study: ways to adapt, each run over the recorded stream with the product's own trainer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from distillspec.config import AdaptConfig, LossConfig
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel, load_draft
from distillspec.provenance import provenance
from distillspec.recipes.osd.hindsight import Hindsight, look_back, redraw
from distillspec.recipes.osd.stores import STORES, Store
from distillspec.recipes.osd.stream import Stream, recording_settings, segment_of
from distillspec.recipes.osd.study import Study
from distillspec.serving.base.tree import NGRAM
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.step_costs import step_costs
from distillspec.serving.online.judging.evidence import Costs
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.trainer import OnlineTrainer

OnSegment = Callable[[LanguageModel, Store | None, int], None]
"""Takes the draft, and the store beside it, after the last request of a segment."""


VERIFIED = "verified"  # learns behind rejected tokens too. Not run unless it is named
PRODUCT = "product"
ARMS = ("static", "flush", "interval", "drift", "both", "gated", *STORES, PRODUCT, VERIFIED)


@dataclass(frozen=True)
class Arm:
    """A way to adapt. Without `adapt` the draft never changes.

    gated: versions serve once the gate has promoted them. Else every new version serves at once.
    store: of `STORES`, names tokens that are tried before the draft's, and learns from each answer when it ends.
    """

    name: str
    adapt: AdaptConfig | None
    loss: LossConfig
    gated: bool = False
    store: str | None = None


def arms(study: Study) -> list[Arm]:
    """Return the arms.

    Static, OSD's flush mode, by interval, on drift, both, both with the gate, stores beside the static draft, both with
    the gate and n-grams beside, as `distill serve online=on` does by default, and by interval from every node that was
    verified. These are the nodes of the draft that served while the stream was recorded.
    """
    loss = LossConfig(name=study.loss)

    def adapting(**changes: Any) -> AdaptConfig:
        return AdaptConfig(**{**common(study), "on_drift": False, **changes})

    return [
        Arm("static", None, loss),
        Arm("flush", adapting(mode="flush", every_requests=study.flush), loss),
        Arm("interval", adapting(every_requests=study.interval), loss),
        Arm("drift", adapting(every_requests=None, on_drift=True), loss),
        Arm("both", adapting(every_requests=study.interval, on_drift=True), loss),
        Arm("gated", adapting(every_requests=study.interval, on_drift=True), loss, gated=True),
        *(Arm(store, None, loss, store=store) for store in STORES),
        Arm(PRODUCT, adapting(every_requests=study.interval, on_drift=True), loss, gated=True, store=NGRAM),
        Arm(VERIFIED, adapting(every_requests=study.interval, positions="verified"), loss),
    ]


def common(study: Study) -> dict[str, Any]:
    """Return the settings of all training, offline distillation included."""
    return {
        "learning_rate": study.learning_rate,
        "epochs": study.epochs,
        "batch_tokens": study.batch_tokens,
        "row_tokens": study.batch_tokens,
        "min_requests": min(8, study.flush, study.interval, *study.grid_intervals),
        "max_steps": 10_000,
    }


def run_arm(
    study: Study, arm: Arm, stream: Stream, tail_share: float, on_segment: OnSegment | None = None
) -> dict[str, Any]:
    """Run an arm over the stream. Return a row a request, in order, and every update it made.

    Args:
        tail_share: see `redraw`.
    """
    folder = study.work / arm.name
    shutil.rmtree(folder, ignore_errors=True)
    arm_run = _ArmRun(study, arm, stream, tail_share, folder)
    try:
        return arm_run.run(on_segment or (lambda draft, store, segment: None))
    finally:
        arm_run.close()
        shutil.rmtree(folder, ignore_errors=True)


class _ArmRun:
    """Log, registry, trainer and gate as beside a server, called in turn."""

    def __init__(self, study: Study, arm: Arm, stream: Stream, tail_share: float, folder: Path) -> None:
        self.study = study
        self.arm = arm
        self.stream = stream
        self.tail_share = tail_share
        recorded = recording_settings(study)
        settings = replace(
            recorded,
            online=replace(recorded.online, folder=str(folder)),
            replay=replace(recorded.replay, entries=stream.key.entries),
            adapt=arm.adapt or AdaptConfig(),
            loss=arm.loss,
        )
        self.replay = ReplayLog(settings.layout.replay, stream.key, settings.replay)
        self.trainer = OnlineTrainer(settings)
        self.registry = self.trainer.registry
        first = self.registry.add(lambda into: shutil.copytree(first_version(study).path, into))
        self.version = self.registry.promote(first.name, "first draft")
        self.draft = load_draft(self.version.path, stream.target)
        self.states = TargetStates(stream.target)
        judge = Judge(settings, self.registry, self.replay, self.trainer.scorer.table, self._costs)
        self.gate = Gatekeeper(settings, self.registry, judge) if arm.gated else None
        self.store = None if arm.store is None else Store(arm.store, stream.key.vocab_size)
        self.rows: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.promoted: list[int] = []  # requests served before each promotion

    def run(self, on_segment: OnSegment) -> dict[str, Any]:
        started, looking_s = time.monotonic(), 0.0  # looking back, without training
        for group, ended in self._groups():
            before = time.monotonic()
            hindsights = [look_back(self.draft, answer, self.states, self._named(answer)) for answer in group]
            self.states.forget()
            looking_s += time.monotonic() - before
            logged = [self._redrawn(answer, hindsight) for answer, hindsight in zip(group, hindsights, strict=True)]
            self.rows += [row_of(self.study, *triple) for triple in zip(group, logged, hindsights, strict=True)]
            usable = [answer for answer in logged if not self.study.holds_out(answer.request_id)]
            if self.store is not None:
                self.store.learn(usable)
            if self.arm.adapt is not None:
                self.replay.append(usable)
                self._train()
            for segment in ended:
                on_segment(self.draft, self.store, segment)
        return {
            "requests": self.rows,
            "updates": self.updates,
            "promoted": self.promoted,
            "seconds": time.monotonic() - started,
            "looking_s": looking_s,
            "provenance": provenance([], self.study.seed),
        }

    def close(self) -> None:
        for part in (self.replay, self.trainer.replay, self.registry):
            part.close()

    def _groups(self) -> Iterator[tuple[Sequence[LoggedAnswer], list[int]]]:
        """Yield as many answers as run side by side, with the segments that end among them."""
        answers = self.stream.answers
        last = {segment_of(answer): index for index, answer in enumerate(answers)}
        for start in range(0, len(answers), self.study.slots):
            stop = start + self.study.slots
            yield answers[start:stop], sorted(segment for segment, index in last.items() if start <= index < stop)

    def _named(self, answer: LoggedAnswer) -> Tensor | None:
        return None if self.store is None else self.store.named(answer)

    def _redrawn(self, answer: LoggedAnswer, hindsight: Hindsight) -> LoggedAnswer:
        study, version = self.study, self.version.served_as
        return redraw(answer, hindsight, version, study.speculation_length, study.seed, self.tail_share)

    def _train(self) -> None:
        """Judge the candidate by what is new, make an update if one is due, and serve what was promoted."""
        if self.gate is not None:
            while self.trainer.judge():
                pass
            self.gate.work()
        reason = self.trainer.due()
        version = self.trainer.update(reason) if reason is not None else None
        if version is not None:
            names = ("steps", "tokens", "loss", "loss_at_end", "seconds")
            figures = {name: version.metrics[name] for name in names}
            self.updates.append({"after": len(self.rows), "reason": reason, **figures})
            if self.gate is None:
                self.registry.promote(version.name, str(reason))
                self.registry.clear_away(0)
        current = self.registry.current()
        if current is not None and current.name != self.version.name:
            self.version, self.draft = current, load_draft(current.path, self.stream.target)
            self.promoted.append(len(self.rows))

    def _costs(self) -> Costs:
        return step_costs(self.stream.target, self.draft)


def row_of(study: Study, served: LoggedAnswer, answer: LoggedAnswer, hindsight: Hindsight) -> dict[str, Any]:
    """Return one request's figures, as sums over its tokens.

    Args:
        served: the answer as it was recorded.
        answer: the same, redrawn as if this arm's draft had served.
    """
    return {
        "segment": segment_of(answer),
        "split": "held_out" if study.holds_out(answer.request_id) else "train",
        "tokens": len(hindsight),
        "upper": round(float(hindsight.upper.sum()), 4),
        "lower": round(float(hindsight.lower.sum()), 4),
        "tried": answer.tried,
        "accepted": answer.accepted,
        "served_tried": served.tried,
        "served_accepted": served.accepted,
    }


def first_version(study: Study) -> Version:
    """Return the version that served while the stream was recorded."""
    registry = VersionRegistry(study.stream / "versions")
    try:
        return registry.get(registry.promotions()[0]["version"])
    finally:
        registry.close()
