"""Supervisor of the embedded trainer: starts it when there is work, and again, after growing pauses, when it ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from distillspec.files import private_file, private_folder
from distillspec.serving.online.log.replay_log import CHANGING
from distillspec.serving.online.state.layout import (
    LOG_BYTES,
    OnlineSettings,
    TrainerState,
    lift_quarantine,
    read_states,
)
from distillspec.serving.online.state.lock import is_held
from distillspec.serving.online.state.version import ONLY
from distillspec.serving.online.training.brake import Brake
from distillspec.serving.online.training.heartbeat import Heartbeat
from distillspec.serving.online.training.process import OCCUPIED, QUARANTINED, write_settings
from distillspec.training.lifeline import allows_stops

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S, OCCUPIED_WAIT_S = 1.0, 3600.0, 15.0
BUSY_S = 10.0  # that a start waits for running requests, since its imports take seconds of CPU
MOST_THREADS = 8  # by default: products of a small draft gain nothing from more
TOO_OFTEN = 5  # ends in a row without an update in between: it is said to be failing from then on
MOST_DOUBLINGS = 20  # of a pause. `LONGEST_WAIT_S` bounds it long before: this keeps the power finite
# Of libgomp: rounds that a thread of the trainer spins at a barrier before it sleeps. The library's own number lets it
# spin through whole time slices for a thread whose core the engine has: an answer took 1 s to judge in place of 30 ms.
SPINS = 5000
SECRETS = ("DISTILLSPEC_API_KEY", "DISTILLSPEC_ADMIN_KEY")  # not passed on to the trainer


class Supervisor:
    """Runs the trainer as a process. Call `poll` regularly. Nothing here waits for the trainer.

    Args:
        needed: returns True if a trainer has work. Called while none runs.
        members: returns the drafts that it trains, by the registry's names.
        command: starts the trainer. Default: this package's module.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        *,
        needed: Callable[[], bool] = lambda: True,
        members: Callable[[], list[str]] = lambda: [ONLY],
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.layout = settings.layout
        self._needed = needed
        self._clock = clock
        self._members = members
        module = "distillspec.serving.online.training"
        self.command = list(command or (sys.executable, "-P", "-m", module, str(self.layout.root)))
        self.process: subprocess.Popen | None = None
        changing = self.layout.replay / CHANGING
        self.brake = Brake(self._braked, settings.adapt.busy_share, holds_lock=lambda: is_held(changing))
        self._heartbeat = Heartbeat(self.layout.heartbeat, lambda: self.brake.stopped_s, clock)
        # Between requests it has the machine for itself. Asked here: the thread that polls computes with one core.
        self.threads = settings.adapt.threads or (min(MOST_THREADS, torch.get_num_threads()) if self.brake.stops else 1)
        self._ends = 0
        self._updates = 0
        self.next_start_s = 0.0
        self._needed_s: float | None = None  # since when a trainer is needed
        self.absent = "waiting_for_text"  # stage while no process runs: this, starting or gone
        self.starts = 0
        self.problem: str | None = None  # why it is not started again
        self.failing: str | None = None  # why it is started again only after long pauses
        self.occupied = False  # another trainer works on the folder, and this one waits for its end

    @property
    def pid(self) -> int | None:
        """Process id of the trainer while it runs."""
        running = self.process is not None and self.process.poll() is None
        return self.process.pid if running and self.process is not None else None

    def poll(self, idle: bool = True) -> None:
        """Start the trainer if none runs and one may start. Notice that it ended, and end one that hangs.

        Args:
            idle: no request runs now, or none is to be waited for. Otherwise a start waits, at most `BUSY_S`, unless
                `adapt.busy_share` is 1.
        """
        if self.problem is not None:
            return
        if self.process is None:
            if self._clock() >= self.next_start_s and self._may_start(idle):
                self._start()
            return
        code = self.process.poll()
        if code is not None:
            self._ended(code)
            return
        if self._ends:
            self._notice_update(self._state())
        if self._heartbeat.is_lost():
            self._end_hung(self.process.pid)

    def stop(self) -> None:
        """End the trainer. An unfinished update is lost."""
        self.brake.release()
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
        self._close()

    def lift(self) -> None:
        """Lift a quarantine, or end a pause between two starts. The operator has looked into it."""
        lift_quarantine(self.layout, self._members())
        self.problem = self.failing = None
        self._ends, self.next_start_s = 0, 0.0

    def _braked(self) -> int | None:
        pid = self.pid
        return pid if pid is not None and allows_stops(pid) else None

    def _state(self) -> TrainerState:
        return read_states(self.layout, self._members())

    def _may_start(self, idle: bool) -> bool:
        quarantined = self._state().quarantined
        if quarantined:
            self._give_up(quarantined)
            return False
        if not self._needed():
            self._needed_s, self.absent = None, "waiting_for_text"
            return False
        self.absent = "starting"
        if self._needed_s is None:
            self._needed_s = self._clock()
        beside_requests = self.settings.adapt.busy_share == 1  # it has cores of its own
        return idle or beside_requests or self._clock() - self._needed_s >= BUSY_S

    def _start(self) -> None:
        self._needed_s = None
        private_folder(self.layout.trainer)
        write_settings(replace(self.settings, adapt=replace(self.settings.adapt, threads=self.threads)))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
        environment = {"GOMP_SPINCOUNT": str(SPINS), **kept, "OMP_NUM_THREADS": str(self.threads)}
        if self.settings.adapt.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        trainer_log = self.layout.trainer / "trainer.log"
        if trainer_log.is_file() and trainer_log.stat().st_size >= LOG_BYTES:
            trainer_log.replace(trainer_log.with_name("trainer.1.log"))
        private_file(trainer_log)
        with trainer_log.open("a") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,  # closes when this process ends
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.starts += 1
        self._heartbeat.begin()
        self._lower_priority(self.process.pid)

    def _end_hung(self, pid: int) -> None:
        log.error("the online trainer hangs (no sign of life for %.0f s) and is ended", self._heartbeat.silent_s)
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(pid, signal.SIGKILL)
        self._heartbeat.begin()

    def _lower_priority(self, pid: int) -> None:
        """Lower its priority before its first import, so that its threads inherit it.

        A session of its own is scheduled as a group where Linux groups sessions, whatever the niceness inside.
        """
        lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + self.settings.adapt.niceness)
        with suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, pid, lower)
        with suppress(OSError):  # no such groups here
            Path(f"/proc/{pid}/autogroup").write_text(str(lower))

    def _ended(self, code: int) -> None:
        self._close()
        self.absent = "gone"
        if code == OCCUPIED:
            self._wait_for_other()
            return
        self.occupied = False
        state = self._state()
        if code == QUARANTINED or state.quarantined:
            self._give_up(state.quarantined or "see trainer.log")
            return
        self._notice_update(state)
        self._ends += 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._ends - 1, MOST_DOUBLINGS))
        self.next_start_s = self._clock() + wait_s
        if self._ends < TOO_OFTEN:
            log.warning("the online trainer ended (code %s); it starts again in %.0f s", code, wait_s)
            return
        self.failing = (
            f"it ended {self._ends} times in a row without an update (code {code}), and waits {wait_s:.0f} s before "
            f"the next start; see {self.layout.trainer}/trainer.log"
        )
        log.error("the online trainer keeps ending: %s", self.failing)

    def _notice_update(self, state: TrainerState) -> None:
        """Forget earlier ends once an update is made."""
        if state.updates != self._updates:
            self._updates = state.updates
            self._ends = 0
            self.failing = None

    def _wait_for_other(self) -> None:
        """Wait until the other trainer ends. Its updates serve as well as ours."""
        if not self.occupied:
            log.warning("another trainer works on %s; the server's own waits for its end", self.layout.root)
        self.occupied, self.next_start_s = True, self._clock() + OCCUPIED_WAIT_S

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        log.error("the online trainer is quarantined: %s", problem)

    def _close(self) -> None:
        assert self.process is not None
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process = None
