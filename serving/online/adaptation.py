"""`Adaptation`: all of online adaptation behind one object, for whoever runs the engine's loop.

    draft = first_draft(settings, target, given="runs/my-draft")
    engine = Engine(target, load_pretrained(draft, target, target.dtype))
    with Adaptation(engine, settings) as adaptation:
        while True:
            adaptation.on_step(engine.step())

The engine's thread calls `on_step`; everything else may come from any thread. Nothing here fails a request: what goes
wrong is logged, counted and shown by `stats`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from torch import Tensor

from distillspec.errors import ConfigError, RunError
from distillspec.files import private_folder
from distillspec.serving.commit import Emission
from distillspec.serving.control.wrapped import known_costs
from distillspec.serving.core import StepOutput
from distillspec.serving.engine import Engine
from distillspec.serving.online.beginning import first_draft
from distillspec.serving.online.gate import estimate_costs
from distillspec.serving.online.gatekeeper import Gatekeeper
from distillspec.serving.online.idle import BetweenSteps, Stopped
from distillspec.serving.online.layout import OnlineSettings, TrainerControl, TrainerState
from distillspec.serving.online.lock import held, is_held
from distillspec.serving.online.monitor import ServedAcceptance
from distillspec.serving.online.need import fewest_answers
from distillspec.serving.online.records import LogKey
from distillspec.serving.online.redaction import Redaction
from distillspec.serving.online.registry import Version, VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.online.shadow import ServedStates, Shadow
from distillspec.serving.online.supervisor import Supervisor
from distillspec.serving.online.tap import ReplayTap
from distillspec.serving.online.writer import LogWriter
from distillspec.serving.threads import compute_alone
from distillspec.training.tracking import MetricsLog

__all__ = ["Adaptation", "OnlineSettings", "first_draft"]

log = logging.getLogger(__name__)

POLL_S = 0.2
METRICS_BYTES = 64 << 20  # of metrics.jsonl, and of the one before it: weeks
IDLE_AFTER_S = 2.0  # without a running request the engine counts as idle


class Adaptation:
    """Logs, trains, judges, swaps and rolls back while `engine` serves.

    Args:
        engine: serves the registry's promoted version (`first_draft`).
        redact: see `redaction.Redaction`.
        report: told every verdict, rollback, alarm and line of figures; by default `metrics.jsonl` in the folder.
        wake: makes a sleeping loop call `engine.step` again; the gate's work is done there.

    Raises:
        ConfigError: the folder holds another target's log, or no version is promoted.
    """

    def __init__(
        self,
        engine: Engine,
        settings: OnlineSettings,
        *,
        redact: Redaction | None = None,
        report: Callable[[dict[str, Any]], None] | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.engine, self.settings, self.layout = engine, settings, settings.layout
        self._report = report or MetricsLog(self.layout.root / "metrics.jsonl", METRICS_BYTES).add
        key = LogKey.of(engine.target.identity, settings.replay.entries)
        self.replay = ReplayLog(self.layout.replay, key, settings.replay, seed=settings.seed)
        self.registry = VersionRegistry(self.layout.versions)
        self.writer = LogWriter(self.replay, redact)
        self.tap = ReplayTap(
            settings.replay, self.writer.put, self.replay.clock, settings.seed, is_full=lambda: self.replay.full
        )
        self.served = ServedAcceptance(settings.gate, self._alarm)
        self.served.recall(self.registry.served())
        self._between = BetweenSteps(engine, settings.gate.busy_share, wake)
        shadow = Shadow(engine.target, ServedStates(engine.target), settings.gate.max_gamma, self._between.run)
        self.gatekeeper = Gatekeeper(
            settings,
            self.registry,
            self.replay,
            shadow,
            costs=lambda draft: estimate_costs(
                engine.target, draft, settings.gate, known_costs(engine.core.controller)
            ),
            swap=self._swap,
            served=self.served,
            report=self._tell,
        )
        if self.gatekeeper.serving is None:
            raise ConfigError(f"no draft is promoted in {self.layout.versions}; see first_draft")
        self._base = self.registry.promotions()[0]["version"]
        self._shadow = shadow
        embedded = settings.online.mode == "on"
        self.supervisor = Supervisor(settings, needed=self._something_to_learn) if embedded else None
        self._control = TrainerControl.read(self.layout.control).with_(idle=True)
        self.tap.paused = self._control.paused
        self._busy_s = time.monotonic()
        self._started_s = time.monotonic()
        self._trained_before_s = TrainerState.read(self.layout.state).seconds
        self._lines = 0
        self.happened: Counter[str] = Counter()  # since the start: promoted, refused, suspicion, rollback, alarm, …
        self._open = ExitStack()
        self._said: str | None = None  # the trainer's problem, as last told
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to log, and with online=on to train.

        Raises:
            RunError: another server trains in this folder.
        """
        private_folder(self.layout.trainer)
        if self.supervisor is not None:
            refusal = (
                f"another server trains in {self.layout.root}; use online=decoupled here, or another online.folder"
            )
            self._open.enter_context(held(self.layout.trainer / "server.lock", wait=False, refusal=refusal))
        self._control.write(self.layout.control)
        if self.paused:
            log.warning("online adaptation is still paused: it logs and learns nothing until somebody resumes it")
        self.writer.start()
        self.engine.core.committer.observer = self._observe
        for name, work, every_s in (
            ("gatekeeper", self._keep_gate, POLL_S),
            ("trainer-watch", self._keep_house, POLL_S),
        ):
            thread = threading.Thread(target=self._repeat, args=(work, every_s), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Write what was logged, end the trainer; the engine serves on as it is."""
        self.engine.core.committer.observer = None
        self._stopping.set()
        self._between.stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self.supervisor is not None:
            self.supervisor.stop()
        self.writer.stop()
        self._write_figures()
        self.replay.close()
        self.registry.close()
        self._open.close()

    def __enter__(self) -> Adaptation:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def on_step(self, output: StepOutput) -> None:
        """To be called after every step, with what it gave. Never raises."""
        try:
            self._take(output)
        except Exception:
            log.exception("online adaptation missed a step")

    def _take(self, output: StepOutput) -> None:
        if output.result is not None and output.result.rows:
            self._busy_s = time.monotonic()
        if output.finished:
            self.tap.finish(output.finished)
            self.served.finish(output.finished)

    @property
    def paused(self) -> bool:
        return self._control.paused

    def pause(self) -> None:
        """Log nothing new and train no more, until `resume`; a restart stays paused."""
        self.tap.paused = True
        self._tell_trainer(paused=True)

    def resume(self) -> None:
        """Go on after `pause`, or after a quarantine that somebody has looked into."""
        self.tap.paused = False
        if self.supervisor is not None:
            self.supervisor.lift()
        self._tell_trainer(paused=False)

    def trigger(self) -> None:
        """Ask for an update now."""
        self.writer.flush()
        self._tell_trainer(asked=self._control.asked + 1)

    def verdicts(self) -> list[dict[str, Any]]:
        """What became of every judged version, oldest first."""
        return [
            {"version": v.name, "status": v.status, "reason": v.reason, **v.verdict}
            for v in self.registry.versions()
            if v.verdict or v.reason
        ]

    def delete_tenant(self, tenant: str) -> int:
        """Delete what was logged of a tenant; how many logged answers there were.

        Covered: its answers in the making, those that wait, shards and manifest; what the gate has read; the prompts
        that idle slots remember, of all tenants; an update under way that learnt from it, of which no version comes.
        Not covered: versions made before, exports and backups, the numbers in the KV caches until other text
        overwrites them, requests that still run, and the tenant's name (in the list of deletions; with
        `adapt.drift_by=tenant` in the trainer's state and the figures). Its next requests are logged again:
        `replay.exclude_tenants` keeps them out.

        Raises:
            RunError: the answers are off the list, and bytes are left in files until the next deletion or start.
        """
        self.tap.forget_tenant(tenant)
        self.writer.forget_tenant(tenant)
        try:
            return self.replay.delete_tenant(tenant)
        finally:
            self._shadow.forget()
            self._between.soon(self.engine.forget_prompts)

    def stats(self) -> dict[str, Any]:
        """Everything there is to see, as plain values."""
        trainer = TrainerState.read(self.layout.state)
        serving = self.gatekeeper.serving
        elapsed = time.monotonic() - self._started_s
        base = self.registry.get(self._base)
        gained = self.served.accepted_gain(base.served_as)
        problem = self.supervisor.problem if self.supervisor is not None else trainer.quarantined
        return {
            "serving": serving.name if serving is not None else None,
            "canary": canary.candidate.name if (canary := self.gatekeeper.canary) is not None else None,
            "waiting_for": self.gatekeeper.waiting_for,
            "suspected": suspicion.reason if (suspicion := self.gatekeeper.suspicion) is not None else None,
            "served": self.served.figures(),
            "log": self.log_figures(),
            "trainer": {
                "pid": self.supervisor.pid if self.supervisor is not None else trainer.pid,
                "starts": self.supervisor.starts if self.supervisor is not None else 0,
                "stage": self.trainer_stage(trainer),
                "updates": trainer.updates,
                "lag": max(0, self.replay.newest_number() - trainer.cursor),
                "learnt": trainer.learnt,
                "skipped": trainer.skipped,
                "capped": trainer.capped,
                "drop_rate": trainer.drop_rate,
                "cpu_s": trainer.cpu_s,
                "share": (trainer.seconds - self._trained_before_s) / elapsed if elapsed > 0 else 0.0,
                "drift": trainer.drift,
                "quarantined": problem,
                "paused": self.paused,
            },
            "gained_tokens": gained,
            "cpu_s_per_gained_token": trainer.cpu_s / gained if gained > 0 else None,
            "device_s_per_gained_token": trainer.seconds / gained if gained > 0 else None,
        }

    def log_figures(self) -> dict[str, int]:
        """What the log holds, and what did not get into it."""
        return {
            **self.replay.sizes(),
            **(self.tap.counters + self.writer.counters),
            "waiting_tokens": self.writer.waiting_tokens,
        }

    def trainer_stage(self, state: TrainerState) -> str:
        """What the trainer does, `quarantined`, `gone` where none runs, `elsewhere` where another keeps ours out,
        `waiting_for_text` where ours has nothing to learn yet and is not started."""
        if self.supervisor is None:
            if state.quarantined:
                return "quarantined"
            return state.stage if is_held(self.layout.trainer / "trainer.lock") else "gone"
        if self.supervisor.problem is not None:
            return "quarantined"
        pid = self.supervisor.pid
        if pid is None and is_held(self.layout.trainer / "trainer.lock"):
            return "elsewhere"
        if pid is None:
            return "paused" if self.paused else self.supervisor.absent
        if state.pid != pid:
            return "starting"
        return "paused" if self.paused and state.stage == "waiting" else state.stage

    def _observe(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        self.served.watch(emissions)
        self.tap(emissions, logits)

    def _swap(self, version: Version) -> None:
        """Load in this thread, and see to it that the next step drafts with it."""
        self.engine.load_draft(version.path)
        self._tell({"event": "swap", "version": version.name, "served_as": version.served_as})

    def _keep_gate(self) -> None:
        with suppress(Stopped):
            self.gatekeeper.work()
        gate = self.settings.gate
        self._shadow.forget_beyond(4 * (gate.requests + gate.offline_samples))

    def _keep_house(self) -> None:
        idle = time.monotonic() - self._busy_s > IDLE_AFTER_S
        if idle != self._control.idle:
            self._tell_trainer(idle=idle)
        if self.supervisor is not None:
            self.supervisor.poll(idle)
            self._tell_of_quarantine(self.supervisor.problem)
        if time.monotonic() - self._started_s > (self._lines + 1) * self.settings.online.metrics_s:
            self._write_figures()

    def _something_to_learn(self) -> bool:
        """Whether a trainer could begin an update with what is logged."""
        if self.paused:
            return False
        state, fewest = TrainerState.read(self.layout.state), fewest_answers(self.settings.adapt)
        new = self.replay.count(after=state.cursor, split="train")
        return (new > 0 and self._control.asked > state.asked) or (fewest is not None and new >= fewest)

    def _tell_of_quarantine(self, problem: str | None) -> None:
        if problem is not None and problem != self._said:
            self._tell({"event": "alarm", "message": f"the online trainer is quarantined: {problem}"})
        self._said = problem

    def _write_figures(self) -> None:
        self._lines = int((time.monotonic() - self._started_s) / self.settings.online.metrics_s)
        self._keep_served()
        self._tell({"event": "figures", "seconds": time.monotonic() - self._started_s, **self.stats()})

    def _keep_served(self) -> None:
        try:
            self.registry.keep_served(self.served.take_news())
        except Exception:  # a full disk, above all: the next line tries again
            log.exception("served acceptance is not kept for the next start")

    def _tell_trainer(self, **changes: Any) -> None:
        with self._lock:
            self._control = self._control.with_(**changes)
            self._control.write(self.layout.control)

    def _alarm(self, message: str) -> None:
        log.error("%s", message)
        self._tell({"event": "alarm", "message": message})

    def _tell(self, record: dict[str, Any]) -> None:
        self.happened[record["decision"] if record["event"] == "verdict" else record["event"]] += 1
        try:
            self._report({"time_s": self.replay.clock(), **record})
        except RunError as error:
            log.warning("a line of figures is lost: %s", error)

    def _repeat(self, work: Callable[[], None], every_s: float) -> None:
        """Until stopped; what goes wrong once is logged, and tried again later."""
        compute_alone()
        wait = every_s
        while not self._stopping.wait(wait):
            wait = every_s
            try:
                work()
            except Exception:
                log.exception("online adaptation: %s failed", threading.current_thread().name)
                wait = 10.0
