"""The server's link to the trainer: its control file, its state, and the embedded process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from distillspec.errors import RunError
from distillspec.files import private_folder
from distillspec.serving.base.threads import usable_cores
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.pool.domains import log_of, owners_now
from distillspec.serving.online.reporting import Reporter
from distillspec.serving.online.state.layout import ADDED, OnlineSettings, TrainerControl, TrainerState, read_states
from distillspec.serving.online.state.lock import held, is_held
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.patience import enough_answers, fewest_answers
from distillspec.serving.online.training.supervisor import Supervisor

log = logging.getLogger(__name__)

URGENT_S = 60.0  # for which suspicions of a version may slow requests down and delay updates


class TrainerLink:
    """Controls the trainer. With online=on it also runs one as a process, through `supervisor`."""

    def __init__(
        self, settings: OnlineSettings, replay: ReplayLog, registry: VersionRegistry, reporter: Reporter
    ) -> None:
        self.settings = settings
        self.layout = settings.layout
        self.replay = replay
        embedded = settings.online.mode == "on"
        self.supervisor = Supervisor(settings, needed=self._has_work, members=self._learning) if embedded else None
        self._registry, self._reporter = registry, reporter
        self._control = TrainerControl.read(self.layout.control)
        self._suspects_until_s: float | None = None  # as this server told it last, None: it suspects nothing
        self._urgent_until_s: dict[str, float] = {}  # by suspected version
        self._started_s = time.monotonic()
        self._trained_before_s = self.state().seconds
        self._reported: str | None = None  # last trouble reported
        self._open = ExitStack()
        self._lock = threading.Lock()

    @property
    def paused(self) -> bool:
        return self._control.paused

    def state(self) -> TrainerState:
        """Read what the trainer last wrote about itself, of all drafts together."""
        state = read_states(self.layout, self._learning())
        before = read_states(
            self.layout, [member.name for member in self._registry.pool.members() if not member.learns]
        )
        return state.with_(**{name: getattr(state, name) + getattr(before, name) for name in ADDED})

    def _learning(self) -> list[str]:
        return self._registry.pool.learners()

    def start(self, beside_cpus: bool = False) -> None:
        """Take the folder's server lock (online=on) and write the control file.

        Args:
            beside_cpus: the engine computes on CPUs, with as many threads as this thread.

        Raises:
            RunError: another server trains in this folder.
        """
        private_folder(self.layout.trainer)
        if self.supervisor is not None:
            refusal = (
                f"another server trains in {self.layout.root}; use online=decoupled here, or another online.folder"
            )
            self._open.enter_context(held(self.layout.trainer / "server.lock", wait=False, refusal=refusal))
            if beside_cpus:
                self._warn_of_overlap(self.supervisor.threads)
        self._tell(suspected=False, urgent_until_s=0.0)  # what a server before this one suspected
        if self.supervisor is not None:
            self.supervisor.brake.start()

    def set_busy(self, busy: bool) -> None:
        """Say whether requests run: see `training.brake`."""
        if self.supervisor is not None:
            self.supervisor.brake.set_busy(busy)

    def stop(self) -> None:
        """End the embedded trainer."""
        if self.supervisor is not None:
            self.supervisor.stop()

    def close(self) -> None:
        """Give the server lock back."""
        self._open.close()

    def pause(self) -> None:
        self._tell(paused=True)

    def resume(self) -> None:
        """End a pause, a quarantine, or the wait for the next start of a trainer that keeps ending."""
        if self.supervisor is not None:
            self.supervisor.lift()
        self._tell(paused=False)

    def request_update(self) -> None:
        """Make an update due now."""
        with self._telling() as control:
            self._control = control.with_(asked=control.asked + 1)

    def poll(self, idle: bool, suspects: Collection[str] = ()) -> None:
        """Start the trainer when it is needed, notice that it ended.

        Args:
            idle: no request runs now.
            suspects: versions that the trainer is to compare with their predecessors. For `URGENT_S` it has a larger
                share of the time.
        """
        until_s = self._urgent_until(suspects)
        suspects_until_s = until_s if suspects else None
        if suspects_until_s != self._suspects_until_s or (suspects and self._was_contradicted()):
            try:
                self._tell(suspected=bool(suspects), urgent_until_s=until_s)
                self._suspects_until_s = suspects_until_s
            except (OSError, RunError) as error:  # a full disk, above all: it is told again
                log.error("the trainer is not told of suspicions: %s", error)
        if self.supervisor is not None:
            urgent = self.replay.clock() < until_s
            self.supervisor.brake.set_urgent(urgent)
            self.supervisor.poll(idle or urgent)
            self._report_trouble(self.supervisor)

    def _was_contradicted(self) -> bool:
        """Return True if another server, which suspects nothing, has written that since."""
        return not TrainerControl.read(self.layout.control).suspected

    def _urgent_until(self, suspects: Collection[str]) -> float:
        """Return until when suspicions go before all else, 0 for none. Each version has such a time once."""
        for name in suspects:
            self._urgent_until_s.setdefault(name, self.replay.clock() + URGENT_S)
        return max([self._urgent_until_s[name] for name in suspects], default=0.0)

    def stage(self, state: TrainerState) -> str:
        """Return the trainer's own stage, or one that the server knows better.

        `quarantined`: it is not started again. `failing`: it keeps ending, and pauses between its starts grow. `gone`:
        none runs. `elsewhere`: another trainer holds the folder. `waiting_for_text`: not started, there is nothing to
        learn yet. `starting`, `paused`.
        """
        if self.supervisor is None:
            if state.quarantined:
                return "quarantined"
            return state.stage if self._is_running_somewhere() else "gone"
        if self.supervisor.problem is not None:
            return "quarantined"
        if self.supervisor.failing is not None and not self.paused:
            return "failing"
        pid = self.supervisor.pid
        if pid is None and self._is_running_somewhere():
            return "elsewhere"
        if pid is None:
            return "paused" if self.paused else self.supervisor.absent
        if state.pid != pid:
            return "starting"
        return "paused" if self.paused and state.stage == "waiting" else state.stage

    def figures(self, state: TrainerState) -> dict[str, Any]:
        """Return the `trainer` part of `Adaptation.stats`."""
        supervisor, elapsed_s = self.supervisor, time.monotonic() - self._started_s
        return {
            "pid": supervisor.pid if supervisor is not None else state.pid,
            "starts": supervisor.starts if supervisor is not None else 0,
            "stage": self.stage(state),
            "updates": state.updates,
            "lag": max(0, self.replay.newest_number() - state.cursor),
            "learnt": state.learnt,
            "skipped": state.skipped,
            "capped": state.capped,
            "drop_rate": state.drop_rate,
            "cpu_s": sum(state.cpu_s_by_work.values()),
            "cpu_s_by_work": state.cpu_s_by_work,
            "share": (state.seconds - self._trained_before_s) / elapsed_s if elapsed_s > 0 else 0.0,
            "drift": state.drift,
            "quarantined": supervisor.problem if supervisor is not None else state.quarantined,
            "failing": supervisor.failing if supervisor is not None else None,
            "paused": self.paused,
        }

    def _is_running_somewhere(self) -> bool:
        return is_held(self.layout.trainer / "trainer.lock")

    def wants_text(self) -> bool:
        """Return True while the trainer waits for answers: to learn from, or to judge a candidate by."""
        if self.paused or (self.supervisor is not None and (self.supervisor.problem or self.supervisor.failing)):
            return False
        return any(map(self._waits_for_text, self._owning()))

    def _owning(self) -> list[str]:
        """Return the drafts that learn from a domain. Others wait for text that nobody writes. All, in an empty log."""
        members = self._learning()
        owners = set(owners_now(self.replay, self._registry.pool).values()) if any(members) else set()
        return [member for member in members if member in owners] or members

    def _waits_for_text(self, member: str) -> bool:
        registry, state = self._registry.of(member), self._state(member)
        if state.quarantined:
            return False
        enough = enough_answers(self.settings.adapt, registry.judged_in_vain())
        return (enough is not None and self._new(member, state) < enough) or bool(registry.versions("candidate"))

    def _has_work(self) -> bool:
        """Return True if something is to be judged, or half of the text for an update is there.

        Beside traffic, a start takes about as long as the other half of the text takes to come.
        """
        if self.paused:
            return False
        return self._control.suspected or any(map(self._has_text, self._learning()))

    def _has_text(self, member: str) -> bool:
        if self._registry.of(member).versions("candidate"):
            return True
        state = self._state(member)
        new = self._new(member, state)
        fewest = fewest_answers(self.settings.adapt, self._registry.of(member).judged_in_vain())
        asked = self._control.asked > state.asked
        return (new > 0 and asked) or (fewest is not None and 2 * new >= fewest)

    def _state(self, member: str) -> TrainerState:
        return TrainerState.read(self.layout.of(member).state)

    def _new(self, member: str, state: TrainerState) -> int:
        """Count the answers that a draft's next update would learn from."""
        return log_of(member, self.replay, self._registry).count(after=state.cursor)

    def _warn_of_overlap(self, trainers: int) -> None:
        """Warn where nothing stops the trainer, and it and the engine have more threads than there are cores."""
        adapt, servers, cores = self.settings.adapt, torch.get_num_threads(), usable_cores()
        if adapt.busy_share == 1 and adapt.device == "cpu" and servers + trainers > cores:
            log.warning(
                "the trainer's threads (%d) and the server's (%d) are more than the %d cores, and adapt.busy_share=1 "
                "stops neither: passes will wait; start the server with a smaller OMP_NUM_THREADS, or lower the share",
                *(trainers, servers, cores),
            )

    def _report_trouble(self, supervisor: Supervisor) -> None:
        """Report that the trainer is quarantined, or keeps ending, when that begins."""
        trouble, why = None, supervisor.problem or supervisor.failing
        if why is not None:
            trouble = "is quarantined" if supervisor.problem else "keeps ending"
        if trouble not in (None, self._reported):
            self._reporter.tell({"event": "alarm", "message": f"the online trainer {trouble}: {why}"})
        self._reported = trouble

    def _tell(self, **changes: Any) -> None:
        with self._telling() as control:
            self._control = control.with_(**changes)

    @contextmanager
    def _telling(self) -> Iterator[TrainerControl]:
        """Yield what the file says now, and write `_control` to it afterwards. Other servers change it too."""
        with self._lock, held(self.layout.trainer / "control.lock"):
            yield TrainerControl.read(self.layout.control)
            self._control.write(self.layout.control)
