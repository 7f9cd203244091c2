"""Timer of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Part = Literal["planning", "draft", "target", "readings", "overlapped"]


class StepTimer:
    """Seconds of the parts of a step, and of the step in all.

    `readings` are drafts that read ahead of a switch, and the target where it reads texts again. `overlapped` is the
    host's other work while a device runs the target. `drafted_s` has the seconds of each of several sources.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started = clock()
        self.seconds: dict[Part, float] = {
            "planning": 0.0,
            "draft": 0.0,
            "target": 0.0,
            "readings": 0.0,
            "overlapped": 0.0,
        }
        self.drafted_s: dict[str, float] = {}

    @property
    def now(self) -> float:
        """Seconds on the clock."""
        return self.clock()

    @property
    def total_s(self) -> float:
        """Seconds since the step started."""
        return self.clock() - self.started

    @contextmanager
    def timing(self, part: Part) -> Iterator[None]:
        """Add the time inside the block to a part, also where the block raises."""
        started = self.clock()
        try:
            yield
        finally:
            self.seconds[part] += self.clock() - started

    def add_drafted(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of each of several sources."""
        for source, source_s in seconds.items():
            self.drafted_s[source] = self.drafted_s.get(source, 0.0) + source_s
