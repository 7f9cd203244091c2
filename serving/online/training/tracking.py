"""One run of an external tracker for the trainer's updates and the server's figures.

The server only appends lines to `metrics.jsonl`. The trainer's process reads them and holds the tracker, so serving
never waits for it. A trainer elsewhere (`online=decoupled`) works the same way.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distillspec.serving.online.state.layout import LOG_BYTES, OnlineSettings, Tracked
from distillspec.training.tracking import MetricsLog, Tracker

log = logging.getLogger(__name__)


class OnlineTracking:
    """Sends the trainer's records (`report`) and the server's lines (`follow`) to a tracker.

    Args:
        folder: of the run, with its `metrics.jsonl`, the tracker's files and its id.
        tracker: already started. None: only `metrics.jsonl` is written.
    """

    def __init__(self, settings: OnlineSettings, folder: Path, tracker: Tracker | None) -> None:
        self._metrics, self._tracker = MetricsLog(folder / "metrics.jsonl", LOG_BYTES), tracker
        self._served = settings.layout.root / "metrics.jsonl"
        self._tracked_file = folder / "tracked.json"
        self._tracked = Tracked.read(self._tracked_file)

    def report(self, record: dict[str, Any]) -> None:
        """Write a record of the trainer."""
        self._metrics.add(record)
        if self._tracker is not None:
            self._send(record)
            self._tracked.write(self._tracked_file)

    def follow(self) -> None:
        """Send the lines that the server has written since. A line without its end waits for the next call."""
        if self._tracker is None or not self._served.is_file():
            return
        if self._served.stat().st_size < self._tracked.offset:
            self._tracked = self._tracked.with_(offset=0)  # the file was started anew
        with self._served.open("rb") as stream:
            stream.seek(self._tracked.offset)
            lines, _, _ = stream.read().rpartition(b"\n")
        if not lines:
            return
        for line in lines.splitlines():
            try:
                self._send(json.loads(line))
            except ValueError:
                continue  # a line that a crash cut
        self._tracked = self._tracked.with_(offset=self._tracked.offset + len(lines) + 1)
        self._tracked.write(self._tracked_file)

    def wait(self, seconds: float) -> None:
        """Follow, then sleep."""
        self.follow()
        time.sleep(seconds)

    def _send(self, record: dict[str, Any]) -> None:
        assert self._tracker is not None
        self._tracked = self._tracked.with_(step=self._tracked.step + 1)
        try:
            self._tracker.accelerator.log(curves(record), step=self._tracked.step)
        except Exception as error:  # a failing tracker must not stop training
            log.warning("the tracker refused a record: %s", error)


@contextmanager
def open_tracking(settings: OnlineSettings, folder: Path) -> Iterator[OnlineTracking]:
    """Start the configured tracker, if any. With the same folder it continues the same run."""
    if settings.tracker.kind == "none":
        yield OnlineTracking(settings, folder, None)
        return
    from accelerate import Accelerator

    tracker = Tracker(Accelerator(cpu=settings.adapt.device == "cpu"), settings.tracker, folder)
    tracker.start(settings.tracker, folder, asdict(settings))
    tracking = OnlineTracking(settings, folder, tracker)
    try:
        yield tracking
    finally:
        tracking.follow()
        tracker.close()


def curves(record: dict[str, Any]) -> dict[str, float]:
    """Return a record's numbers under dotted names that start with its event. A verdict's decision becomes 1."""
    event = str(record.get("event", "online"))
    numbers = dict(_numbers(event, {name: value for name, value in record.items() if name not in ("event", "step")}))
    if isinstance(decision := record.get("decision"), str):
        numbers[f"{event}.{decision}"] = 1.0
    return numbers


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _numbers(f"{name}.{index}", inner)
    elif isinstance(value, (int, float)) and math.isfinite(value):
        yield name, float(value)
