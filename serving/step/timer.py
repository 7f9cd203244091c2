"""Timer of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class StepTimer:
    """Seconds a step spends planning, drafting, in the target, and in all.

    `drafted_s` has those of each of several sources. `readings_s` has those of drafts that read ahead of a switch, and
    of the target that reads texts again, `overlapped_s` those of the host's other work while a device runs the target.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started = clock()
        self.planning_s = self.draft_s = self.target_s = 0.0
        self.drafted_s: dict[str, float] = {}
        self.readings_s = self.overlapped_s = 0.0

    @property
    def now(self) -> float:
        """Seconds on the clock."""
        return self.clock()

    @property
    def total_s(self) -> float:
        """Seconds since the step started."""
        return self.clock() - self.started

    def add_drafted(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of each of several sources."""
        for source, own in seconds.items():
            self.drafted_s[source] = self.drafted_s.get(source, 0.0) + own

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Add the time inside the block to `planning_s`."""
        started = self.clock()
        yield
        self.planning_s += self.clock() - started

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Add the time inside the block to `overlapped_s`."""
        started = self.clock()
        yield
        self.overlapped_s += self.clock() - started

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Add the time inside the block to `draft_s`."""
        started = self.clock()
        yield
        self.draft_s += self.clock() - started

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Add the time inside the block to `target_s`."""
        started = self.clock()
        yield
        self.target_s += self.clock() - started
