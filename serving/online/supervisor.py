"""Starts the embedded trainer when there is something to learn, watches it, and starts it again; gives up when it keeps
failing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from distillspec.files import private_file, private_folder
from distillspec.serving.online.layout import OnlineSettings, TrainerState
from distillspec.serving.online.process import OCCUPIED, QUARANTINED, write_settings

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S, OCCUPIED_WAIT_S = 1.0, 60.0, 15.0
BUSY_S = 10.0  # that a start waits for running requests; a start imports for seconds
TOO_OFTEN = 5  # ends in a row, without an update in between
SECRETS = ("DISTILLSPEC_API_KEY", "DISTILLSPEC_ADMIN_KEY")  # a server's environment; a trainer has no use for them


class Supervisor:
    """`poll` now and then does all the work; nothing here waits for the trainer.

    Args:
        needed: whether a trainer has something to do; asked while none runs.
    """

    def __init__(
        self,
        settings: OnlineSettings,
        *,
        needed: Callable[[], bool] = lambda: True,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.layout, self._needed, self._clock = settings, settings.layout, needed, clock
        module = "distillspec.serving.online.process"
        self._command = list(command or (sys.executable, "-P", "-m", module, str(self.layout.root)))
        self._process: subprocess.Popen | None = None
        self._ends = 0
        self._updates = 0
        self._next_s = 0.0
        self._needed_s: float | None = None  # since when one is needed
        self.absent = "waiting_for_text"  # the stage while no process runs: or starting (soon), or gone (it ended)
        self.starts = 0
        self.problem: str | None = None  # why it is not started any more
        self.occupied = False  # another trainer works on the folder: this one waits for its end

    @property
    def pid(self) -> int | None:
        """The trainer's process number while it runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    def poll(self, idle: bool = True) -> None:
        """Start the trainer where none runs and it may; notice that it ended.

        Args:
            idle: no request runs now. While some do, a start waits, but not for ever.
        """
        if self.problem is not None:
            return
        if self._process is None:
            if self._clock() >= self._next_s and self._may_start(idle):
                self._start()
            return
        code = self._process.poll()
        if code is not None:
            self._ended(code)

    def stop(self) -> None:
        """End the trainer; what it had not finished is lost."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self._close()

    def lift(self) -> None:
        """Forget a quarantine: somebody has looked into it."""
        state = TrainerState.read(self.layout.state)
        if state.quarantined and self._process is None:
            state.with_(quarantined=None, bad_updates=0, working=None).write(self.layout.state)
        self.problem, self._ends, self._next_s = None, 0, 0.0

    def _may_start(self, idle: bool) -> bool:
        quarantined = TrainerState.read(self.layout.state).quarantined
        if quarantined:
            self._give_up(quarantined)
            return False
        if not self._needed():
            self._needed_s, self.absent = None, "waiting_for_text"
            return False
        self.absent = "starting"
        if self._needed_s is None:
            self._needed_s = self._clock()
        return idle or self._clock() - self._needed_s >= BUSY_S

    def _start(self) -> None:
        self._needed_s = None
        private_folder(self.layout.trainer)
        write_settings(self.settings)
        threads = str(self.settings.adapt.threads)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
        environment = {**kept, "OMP_NUM_THREADS": threads}
        if self.settings.adapt.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        private_file(self.layout.trainer / "trainer.log")
        with (self.layout.trainer / "trainer.log").open("a") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # closes with this process, however it ends
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.starts += 1
        self._lower_priority(self._process.pid)

    def _lower_priority(self, pid: int) -> None:
        """From its first import on: the threads that it starts inherit it."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        with suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, pid, min(19, own + self.settings.adapt.niceness))

    def _ended(self, code: int) -> None:
        self._close()
        self.absent = "gone"
        if code == OCCUPIED:
            self._wait_for_the_other()
            return
        self.occupied = False
        state = TrainerState.read(self.layout.state)
        if code == QUARANTINED or state.quarantined:
            self._give_up(state.quarantined or "see trainer.log")
            return
        self._ends = 1 if state.updates > self._updates else self._ends + 1
        self._updates = state.updates
        if self._ends >= TOO_OFTEN:
            self._give_up(f"it ended {self._ends} times in a row (code {code}); see {self.layout.trainer}/trainer.log")
            return
        wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._ends - 1))
        log.warning("the online trainer ended (code %s); it starts again in %.0f s", code, wait)
        self._next_s = self._clock() + wait

    def _wait_for_the_other(self) -> None:
        """Its updates are as good as ours would be; when it ends, ours begin."""
        if not self.occupied:
            log.warning("another trainer works on %s; the server's own waits for its end", self.layout.root)
        self.occupied, self._next_s = True, self._clock() + OCCUPIED_WAIT_S

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        log.error("the online trainer is quarantined: %s", problem)

    def _close(self) -> None:
        assert self._process is not None
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
