"""Micro-batches of a step: while the target verifies one, drafts draft for the next (SPIN, Chen et al. 2025, §5).

A step of D seconds of drafting and T of verification takes D + T. Split into m micro-batches it takes about
max(D, T) + min(D, T) / m, if smaller batches cost no more a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy

T = TypeVar("T")

TRIAL = 8  # steps that one number of micro-batches is tried for
AGAIN = 512  # steps until a new search. Doubled each time that one batch was best, up to 16 times as many
CLEARLY = 0.97  # share of the best throughput below which further splitting is not tried
FIND = 0  # a setting: search for the number


def split(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split into `count` runs of neighbours, as equal as can be."""
    ends = numpy.linspace(0, len(items), count + 1).round().astype(int).tolist()
    return [items[first:last] for first, last in pairwise(ends)]


def pipelined_s(drafted_s: Sequence[float], verified_s: Sequence[float]) -> float:
    """Return the seconds of micro-batches that are drafted one after another, and verified as they are ready."""
    ready = done = 0.0
    for draft_s, target_s in zip(drafted_s, verified_s, strict=True):
        ready += draft_s
        done = max(done, ready) + target_s
    return done


@dataclass
class _Search:
    """Search for the best number of micro-batches, among steps of about as many rows.

    `tokens` and `seconds` are sums over the steps with the number that is tried. `steps` counts these, and
    after the end of the search those since.
    """

    best: int = 1
    trying: int = 1  # 0: the search has ended
    rates: dict[int, float] = field(default_factory=dict)  # tokens a second, by number
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    wait: int = AGAIN  # steps until the next search


class MicroBatches:
    """Chooses the number of micro-batches: a fixed one, or the one with the most verified tokens a second.

    From one on it splits further until throughput drops clearly, for each number of rows (by powers of two) alone.

    Args:
        wanted: the number, `FIND` (0) to search for it.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self._searches: dict[int, _Search] = {}

    def count(self, rows: int) -> int:
        """Return the number for a step in which `rows` rows draft."""
        if self.wanted != FIND:
            return max(1, min(self.wanted, rows))
        if rows < 2:
            return 1
        search = self._search(rows)
        return min(search.trying or search.best, rows)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            rows: that drafted.
            tokens: verified.
            seconds: of the step.
        """
        if self.wanted != FIND or rows < 2:
            return
        search = self._search(rows)
        if rows < search.trying:  # fewer were used
            return
        search.steps += 1
        if not search.trying:
            if search.steps >= search.wait:
                self._searches[rows.bit_length()] = _Search(wait=search.wait)
            return
        if search.steps > 1:  # the first step with another number fills caches and wakes threads
            search.tokens += tokens
            search.seconds += seconds
        if search.steps > TRIAL:
            self._judge(search, rows)

    def _search(self, rows: int) -> _Search:
        return self._searches.setdefault(rows.bit_length(), _Search())

    @staticmethod
    def _judge(search: _Search, rows: int) -> None:
        """End the trial of one number. Begin that of the next one, unless throughput has dropped."""
        rate = search.tokens / search.seconds if search.seconds else 0.0
        search.rates[search.trying] = rate
        best = search.rates.get(search.best, 0.0)
        if rate > best:
            search.best = search.trying
        search.trying = search.trying + 1 if rate >= CLEARLY * best and search.trying < rows else 0
        search.tokens = search.seconds = 0.0
        search.steps = 0
        if not search.trying:
            search.wait = min(2 * search.wait, 16 * AGAIN) if search.best == 1 else AGAIN
