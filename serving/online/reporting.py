"""Reporter of what online adaptation does, to `metrics.jsonl` and other readers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from distillspec.errors import RunError
from distillspec.serving.online.state.events import Record, Report

log = logging.getLogger(__name__)


class Reporter:
    """Passes records on with their time, and counts them.

    Args:
        report: takes a record. A `RunError` costs that record only.
        clock: seconds since the epoch.
    """

    def __init__(self, report: Report, clock: Callable[[], float]) -> None:
        self._report, self._clock = report, clock
        self.events: Counter[str] = Counter()  # since the start. Verdicts count by their decision.

    def tell(self, record: Record) -> None:
        self.events[record["decision"] if record["event"] == "verdict" else record["event"]] += 1
        try:
            self._report({"time_s": self._clock(), **record})
        except RunError as error:
            log.warning("a line of metrics.jsonl is lost: %s", error)

    def alarm(self, message: str) -> None:
        """Log an error and report it."""
        log.error("%s", message)
        self.tell({"event": "alarm", "message": message})
