"""`Adaptation`: all of online adaptation behind one object, for the program that runs the engine's loop.

    draft = first_draft(settings, target, given="runs/my-draft")
    engine = Engine(target, load_pretrained(draft, target, target.dtype))
    with Adaptation(engine, settings) as adaptation:
        while True:
            adaptation.on_step(engine.step())

The engine's thread calls `on_step`. Any thread may call the rest. Nothing here fails a request: errors are logged,
counted and shown by `stats`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor

from distillspec.serving.base.threads import compute_alone
from distillspec.serving.cost_keeper import CostKeeper
from distillspec.serving.engine import Engine
from distillspec.serving.online.bootstrap import first_draft
from distillspec.serving.online.kept_answers import keep_answers
from distillspec.serving.online.learning_pool import LearningPool
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.redaction import Redaction
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.tap import ReplayTap
from distillspec.serving.online.log.writer import LogWriter
from distillspec.serving.online.reporting import Reporter
from distillspec.serving.online.state.events import Report
from distillspec.serving.online.state.layout import LOG_BYTES, OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.trainer_link import TrainerLink
from distillspec.serving.online.training.supervisor import Supervisor
from distillspec.serving.step.commit import Emission
from distillspec.serving.step.output import StepOutput
from distillspec.training.tracking import MetricsLog

__all__ = ["Adaptation", "OnlineSettings", "first_draft"]

log = logging.getLogger(__name__)

POLL_S = 0.2
RETRY_S = 10.0  # after background work failed
EXPIRE_S = 600.0  # between two searches for answers that are older than the log keeps
IDLE_AFTER_S = 2.0  # without a running request the engine counts as idle


class Adaptation:
    """Logs, trains, judges, swaps and rolls back drafts while `engine` serves.

    Args:
        engine: serves the registry's promoted version (`first_draft`).
        redact: see `redaction.Redaction`.
        report: takes every verdict, rollback, alarm and line of figures. Default: `metrics.jsonl` in the folder.
        wake: makes a sleeping loop call `engine.step` again.

    Raises:
        ConfigError: the folder holds another target's log, or no version is promoted.
    """

    def __init__(
        self,
        engine: Engine,
        settings: OnlineSettings,
        *,
        redact: Redaction | None = None,
        report: Report | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.layout = settings.layout
        key = LogKey.of(engine.target.identity, settings.replay.entries)
        self.replay = ReplayLog(self.layout.replay, key, settings.replay, seed=settings.seed)
        report = report or MetricsLog(self.layout.root / "metrics.jsonl", LOG_BYTES).add
        self.reporter = Reporter(report, self.replay.clock)
        self.registry = VersionRegistry(self.layout.versions, self.replay.clock)  # answers are dated by the same clock
        self.writer = LogWriter(self.replay, redact)
        self.tap = ReplayTap(
            settings.replay,
            self.writer.put,
            self.replay.clock,
            is_full=lambda: self.replay.full,
            verification=engine.settings.verification,
            device=engine.target.device.type,
            keeps_rejected=settings.adapt.positions == "verified",
        )
        self.tap.excluded = self.replay.excluded()
        self._wake, self._redacts = wake or (lambda: None), redact is not None
        self.pool = LearningPool(settings, engine, self.registry, self.replay, self.reporter)
        self.trainer = TrainerLink(settings, self.replay, self.registry, self.reporter)
        self.tap.paused = self.trainer.paused
        used = (self.registry.newest_request(), self.trainer.state().cursor, self.pool.newest_scored())
        self.replay.go_on_from(max(used))  # the log may have been removed
        self._costs = CostKeeper(engine, self.layout.costs)
        self._busy_s = self._started_s = time.monotonic()
        self._expires_s = self._started_s + EXPIRE_S
        self._lines = 0  # of figures, written so far
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def supervisor(self) -> Supervisor | None:
        """The embedded trainer's supervisor. None with online=decoupled."""
        return self.trainer.supervisor

    def start(self) -> None:
        """Start logging, judging and, with online=on, training.

        Raises:
            RunError: another server trains in this folder.
        """
        self.trainer.start(beside_cpus=self.engine.target.device.type == "cpu")
        if self.paused:
            log.warning("online adaptation is still paused: it logs and learns nothing until somebody resumes it")
        self.writer.start()
        keep_answers(self.engine, self.layout, self.tap.left_out, redacted=self._redacts)
        self.engine.observer, self.engine.may_keep = self.observe, self.tap.admits
        # A request's prompt is read in its first step. Beside a running trainer that took ten times as long.
        self.engine.before_step = partial(self.trainer.set_busy, True)
        for name, work in (("gatekeeper", self.pool.judge), ("trainer-watch", self._keep_house)):
            thread = threading.Thread(target=self._repeat, args=(work, POLL_S), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Write what was logged and end the trainer. The engine keeps serving its draft."""
        self.engine.observer = self.engine.before_step = self.engine.may_keep = None
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self.trainer.stop()
        self.writer.stop()
        self._write_figures()
        self.replay.close()
        self.registry.close()
        self.pool.close()
        self.trainer.close()

    def __enter__(self) -> Adaptation:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def observe(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        """Count and log a step's emitted tokens. See `serving.step.commit.Observer`."""
        self.pool.watch(emissions)
        self.tap(emissions, logits)

    def on_step(self, output: StepOutput) -> None:
        """Take a step's output. Call it after every step. Never raises."""
        try:
            self._take(output)
        except Exception:
            log.exception("online adaptation missed a step")

    def _take(self, output: StepOutput) -> None:
        self.trainer.set_busy(self.engine.has_work)
        if output.result is not None and output.result.rows:
            self._busy_s = time.monotonic()
            self.pool.take(output.result)
        if output.finished:
            self.tap.finish(output.finished)
            self.pool.finish(output.finished)

    @property
    def paused(self) -> bool:
        return self.trainer.paused

    def pause(self) -> None:
        """Stop logging and training until `resume`. A restart stays paused."""
        self.tap.paused = True
        self.trainer.pause()

    def resume(self) -> None:
        """Log and train again, after `pause`, or after a quarantine whose cause is fixed."""
        self.tap.paused = False
        self.trainer.resume()

    def trigger(self) -> None:
        """Request an update now."""
        self.writer.flush()
        self.trainer.request_update()

    def verdicts(self) -> list[dict[str, Any]]:
        """Return name, status, reason and verdict of every judged version, oldest first."""
        return self.pool.verdicts()

    def delete_tenant(self, tenant: str) -> int:
        """Delete what was logged of a tenant. Return how many logged answers there were.

        Covered: its running answers and those waiting to be written, shards, manifest and exports, what proposers keep
        in memory and on disk, the prompts that idle slots remember and the values of the KV caches (of all tenants),
        and the result of an update under way. Of requests that run now, nothing is kept after their end.
        Not covered: earlier versions, copies of exports, backups, and the tenant's name in the list of deletions. Its
        next requests are logged again: see `exclude_tenant`.

        Raises:
            RunError: the answers are off the list, but bytes stay in files until the next deletion or start.
        """
        self.tap.forget_tenant(tenant, self.engine.clock())
        self.writer.forget_tenant(tenant)
        try:
            return self.replay.delete_tenant(tenant)
        finally:
            self.engine.forget_tenant(tenant)
            self._wake()

    def exclude_tenant(self, tenant: str, excluded: bool = True) -> None:
        """Log nothing of a tenant from now on, after restarts too, or log it again. What is logged stays.

        Proposers learn nothing of it either, and lose what they have learnt. Raises RunError where a file of it stays.
        """
        try:
            self.replay.exclude_tenant(tenant, excluded)
        finally:
            self.tap.excluded = self.replay.excluded()
            if excluded:
                self.tap.forget_tenant(tenant)
                self.engine.forget_tenant(tenant)
                self._wake()

    def stats(self) -> dict[str, Any]:
        """Return every figure as plain values."""
        state, drafts = self.trainer.state(), self.pool.figures()
        gained = drafts["gained_tokens"]
        return {
            **drafts,
            "log": self.log_figures(),
            "trainer": self.trainer.figures(state),
            "cpu_s_per_gained_token": state.cpu_s_per(gained),
            "device_s_per_gained_token": state.seconds / gained if gained > 0 else None,
        }

    def log_figures(self) -> dict[str, Any]:
        """Return the log's sizes, and since the start counts of answers logged and dropped, and processor time."""
        return {
            **self.replay.sizes(),
            **(self.tap.counters + self.writer.counters),
            "waiting_tokens": self.writer.waiting_tokens,
            "cpu_s": self.tap.cpu_s + self.writer.cpu_s,
        }

    def _keep_house(self) -> None:
        if self.pool.has_several:
            if not self.paused:
                self.pool.keep_specialists()
            self.pool.follow()
        suspects = self.pool.suspects
        self.trainer.poll(idle=time.monotonic() - self._busy_s > IDLE_AFTER_S, suspects=suspects)
        self.tap.wanting = bool(suspects) or self.trainer.wants_text()
        if time.monotonic() > self._expires_s:
            self._expires_s = time.monotonic() + EXPIRE_S
            self.replay.expire()
        if time.monotonic() - self._started_s > (self._lines + 1) * self.settings.online.metrics_s:
            self._write_figures()

    def _write_figures(self) -> None:
        seconds = time.monotonic() - self._started_s
        self._lines = int(seconds / self.settings.online.metrics_s)
        try:
            self.pool.keep_served()
            self._costs.keep()
        except Exception:  # a full disk, above all. The next line tries again.
            log.exception("served acceptance and costs are not kept for the next start")
        self.reporter.tell({"event": "figures", "seconds": seconds, **self.stats()})

    def _repeat(self, work: Callable[[], None], every_s: float) -> None:
        """Repeat `work` until stopped. After an error it waits longer and tries again."""
        compute_alone()
        wait_s = every_s
        while not self._stopping.wait(wait_s):
            wait_s = every_s
            try:
                work()
            except Exception:
                log.exception("online adaptation: %s failed", threading.current_thread().name)
                wait_s = RETRY_S
