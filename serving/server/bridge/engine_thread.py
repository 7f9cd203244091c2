"""The thread that steps the engine.

On a device of its own a step's outputs are written as text and delivered while the next step computes, when the host
has nothing else to do and the device does not wait for it. On CPUs, and where no step follows, they are delivered at
once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from distillspec.serving.base.threads import compute_with
from distillspec.serving.engine import Engine
from distillspec.serving.step.output import StepOutput

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.1  # an idle engine checks for requests this often, in case `wake` was not called
FAILURES = 3  # steps in a row that may fail before the engine is given up


@dataclass(frozen=True)
class StepReport:
    """A step, and the engine's load after it."""

    output: StepOutput
    running: int  # answers that hold a slot
    waiting: int  # answers that wait for one
    cached_tokens: int  # tokens set aside in the cache
    versions: Mapping[str, str]  # of the drafts in use, by source


class EngineThread:
    """Thread that steps the engine while there is work, and sleeps otherwise. `engine.meanwhile` is its own.

    Args:
        engine: no other thread may step it.
        on_step: called in this thread for each step in order, after it or while the next one computes. Must not block.
        on_death: called in this thread, once, with the reason, after `FAILURES` failed steps in a row.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepReport], None], on_death: Callable[[str], None]) -> None:
        self.engine = engine
        self._on_step, self._on_death = on_step, on_death
        self._undelivered: StepReport | None = None
        self._error: BaseException | None = None  # of `on_step`
        self._work = threading.Event()
        self._stopping = False
        self._cores = torch.get_num_threads()  # of the thread that makes this one: other threads may be limited to one
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Check for work now."""
        self._work.set()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Stop after the current step. Return True if it ended within `timeout_s`."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        compute_with(self._cores)
        self.engine.meanwhile = self._deliver
        try:
            self._step_on()
        finally:
            self._deliver()
            self.engine.meanwhile = None
            if self._error is not None:
                log.error("the last step could not be delivered", exc_info=self._error)

    def _step_on(self) -> None:
        """Step until the thread is to stop, or the engine is given up."""
        failures = 0
        while not self._stopping:
            if not self.engine.has_work:
                self._work.wait(IDLE_POLL_S)
                self._work.clear()
                continue
            try:
                self._advance()
                failures = 0
            except BaseException as error:  # a panic of a tokenizer written in Rust is no Exception
                failures += 1 if isinstance(error, Exception) else FAILURES
                log.exception("engine step failed (%d of %d in a row)", failures, FAILURES)
                if failures >= FAILURES:
                    self._on_death(f"{type(error).__name__}: {error}")
                    return

    def _advance(self) -> None:
        """Run a step, and deliver the one before if that is not done yet."""
        try:
            output = self.engine.step()
        finally:
            self._deliver()  # if no pass ran meanwhile, or the pass failed
        self._undelivered = self._report(output)
        if not (self.engine.overlaps and self.engine.has_work):
            self._deliver()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _deliver(self) -> None:
        """Deliver the last step, once. What `on_step` raises is kept until the step that computes is done."""
        report, self._undelivered = self._undelivered, None
        if report is None:
            return
        try:
            self._on_step(replace(report, output=report.output.written()))
        except BaseException as error:  # a panic of a tokenizer written in Rust is no Exception
            self._error = error

    def _report(self, output: StepOutput) -> StepReport:
        sequences = self.engine.sequences
        running = len(sequences.pool.owners)
        return StepReport(
            output,
            running,
            len(sequences.unfinished) - running,
            sequences.pool.reserved_tokens,
            self.engine.draft_versions,
        )
