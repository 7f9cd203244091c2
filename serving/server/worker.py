"""The one thread that steps the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from distillspec.serving.core import StepOutput
from distillspec.serving.engine import Engine

log = logging.getLogger(__name__)

IDLE_LOOK_S = 0.1  # an idle engine looks for messages so often, for those that nobody announced
FAILURES = 3  # steps in a row that may fail before the engine is given up


@dataclass(frozen=True)
class StepReport:
    """A step, and how the engine stood after it."""

    output: StepOutput
    running: int  # answers that hold a slot
    waiting: int  # answers that wait for one
    cached_tokens: int  # tokens set aside in the cache
    draft_version: str  # "" without a draft


class EngineThread:
    """Steps the engine while there is work, sleeps while there is none.

    Args:
        engine: stepped by this thread alone.
        on_step: called in this thread after each step that did something; must not block.
        on_death: called in this thread, once, with the reason, when steps keep failing.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        self.engine = engine
        self._on_step, self._on_death = on_step, on_death
        self._work = threading.Event()
        self._stopping = False
        self._cores = torch.get_num_threads()  # of the thread that makes this one; others may be told to use one
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is work: look now."""
        self._work.set()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Stop after the current step; whether it did in time."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(self._cores)
        failures = 0
        while not self._stopping:
            if not self.engine.has_work:
                self._work.wait(IDLE_LOOK_S)
                self._work.clear()
                continue
            try:
                output = self.engine.step()
                self._on_step(self._report(output))
                failures = 0
            except Exception as error:
                failures += 1
                log.exception("engine step failed (%d of %d in a row)", failures, FAILURES)
                if failures >= FAILURES:
                    self._on_death(f"{type(error).__name__}: {error}")
                    return

    def _report(self, output: StepOutput) -> StepReport:
        core = self.engine.core
        running = len(core.roster.pool.owners)
        return StepReport(
            output,
            running,
            len(core.roster.sequences) - running,
            core.roster.pool.reserved_tokens,
            "" if core.proposer is None else core.proposer.version,
        )
