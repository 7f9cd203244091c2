"""Numbers that the shapes of recorded passes are rounded up to: of tokens above all.

A device that records passes (CUDA graphs) can record few shapes. A pass of N tokens then runs as one of the next larger
number on the ladder, and its linear layers compute, and cost, that number. Steps are small: what only pads is at most a
quarter.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy
from numpy.typing import NDArray

SINGLE = 8  # up to here every number is a step
PARTS = 4  # steps of a doubling from there on: 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, …

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Ladder:
    """Numbers above 0 in ascending order. Numbers beyond the last one are not recorded. They stay what they are."""

    steps: tuple[int, ...] = ()

    @classmethod
    def tokens(cls, most: int) -> Ladder:
        """Return numbers of tokens up to the first one that `most` fits. Ladders to other ends have the same steps."""
        steps, step = list[int](), 0
        while step < most:
            step += max(1, (1 << step.bit_length()) // (2 * PARTS)) if step >= SINGLE else 1
            steps.append(step)
        return cls(tuple(steps))

    @classmethod
    def doubling(cls, most: int, first: int = 1, factor: int = 2) -> Ladder:
        """Return `first`, `factor · first`, … and at last `most`."""
        steps, step = list[int](), first
        while step < most:
            steps.append(step)
            step *= factor
        return cls((*steps, most))

    @property
    def last(self) -> int:
        """The largest number, 0 where nothing is recorded."""
        return self.steps[-1] if self.steps else 0

    def up(self, number: Number) -> Number:
        """Return the number as it is computed: the next step. 0 stays 0, and what is beyond the ladder as it is."""
        if not 0 < number <= self.last:
            return number
        return self.steps[bisect_left(self.steps, number)]

    def all_up(self, numbers: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
        """Return the same for numbers of any shape."""
        if not self.steps:
            return numbers
        steps = numpy.array(self.steps, dtype=numpy.float64)
        found = steps[numpy.searchsorted(steps, numbers).clip(max=len(steps) - 1)]
        return numpy.where((numbers > 0) & (numbers <= self.last), found, numbers)


EXACT = Ladder()  # nothing is recorded: passes compute the tokens that they have


class Recorded(NamedTuple):
    """Numbers of tokens that an engine's passes are recorded in, of the target and of each draft."""

    target: Ladder = EXACT
    drafts: Ladder = EXACT

    @classmethod
    def of(cls, slots: int, speculation_length: int) -> Recorded:
        """Return those of up to `slots` rows: a window of drafted tokens each in the target, one token in drafts."""
        return cls(Ladder.tokens(slots * (1 + speculation_length)), Ladder.tokens(slots))


UNRECORDED = Recorded()
