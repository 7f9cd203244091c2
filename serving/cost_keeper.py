"""Costs of steps as live steps have refined them, written for the next start of a server."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import TracebackType

from distillspec.serving.costs.hardware_profile import machine
from distillspec.serving.costs.kept_costs import cost_key, keep_costs
from distillspec.serving.costs.known import known_costs
from distillspec.serving.engine import Engine

log = logging.getLogger(__name__)

KEEP_S = 300.0


class CostKeeper:
    """Keeps what an engine's steps cost by now, where that was measured and not guessed at first.

    Within `with` it writes now and then, and at the end. What cannot be written is logged.

    Args:
        path: for `kept_costs`. The file is replaced as a whole.
        every_s: seconds between two writes.
    """

    def __init__(self, engine: Engine, path: Path, every_s: float = KEEP_S) -> None:
        self.engine, self.path, self.every_s = engine, path, every_s
        self._machine = machine(engine.target.device)  # before threads are here that compute with one core
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="cost-keeper", daemon=True)

    def keep(self) -> None:
        """Write the costs of now, from any thread.

        Raises:
            OSError: the file cannot be written.
        """
        engine = self.engine
        costs = None if engine.costs is None else known_costs(engine.controller)
        if costs is not None:
            keep_costs(self.path, cost_key(engine.target, engine.drafts, engine.settings, self._machine), costs)

    def __enter__(self) -> CostKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._try()

    def _repeat(self) -> None:
        while not self._stopping.wait(self.every_s):
            self._try()

    def _try(self) -> None:
        try:
            self.keep()
        except Exception:  # a full disk, above all. A server goes on without.
            log.exception("costs of steps are not kept in %s", self.path)
