"""Rows of a batch with the drafts that they have: what one row's choice of a draft brings the whole of it.

Drafts run one after another. A draft that no other row has costs its passes for one row alone, and all rows wait. So a
row's best draft depends on those of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distillspec.serving.base.rows import Option
from distillspec.serving.costs.latency import LatencyModel

RATE = 0.05  # of the averages over steps


class Habit(NamedTuple):
    """Averages of a row of a draft over steps: tokens drafted, and tokens written."""

    drafted: float = 2.0
    written: float = 1.6

    def after(self, drafted: int, written: int) -> Habit:
        """Return the average with one more row."""
        return Habit(self.drafted + RATE * (drafted - self.drafted), self.written + RATE * (written - self.written))


class Priced(NamedTuple):
    """A step of a whole batch in which one row drafts a chain."""

    written: float  # tokens of all rows, but for the chain
    seconds: Sequence[float]  # of the step, by the length of the chain, from 1 on

    def goodput(self, survival: Sequence[float], fixed: int | None = None) -> float:
        """Return the most tokens a second of the batch.

        Args:
            survival: P(the first 1, 2, … tokens of the chain are all accepted), one for each of `seconds`.
            fixed: the only length, None for the best one.
        """
        best, written = 0.0, self.written
        for length, (survives, seconds) in enumerate(zip(survival, self.seconds, strict=True), 1):
            written += survives
            if fixed is None or length == min(fixed, len(survival)):
                best = max(best, written / seconds)
        return best


@dataclass(frozen=True)
class Others:
    """The other rows of a batch.

    rows: how many there are, by draft. None: without one.
    context: cached tokens of all rows, the one that chooses too.
    habits: of drafts, by name.
    blocks: drafts that draft all tokens in one pass.
    """

    rows: Mapping[str | None, int]
    context: int
    habits: Mapping[str, Habit]
    blocks: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        drafts: Iterable[str | None],
        context: int,
        habits: Mapping[str, Habit],
        blocks: frozenset[str] = frozenset(),
    ) -> Others:
        """Return the rows that have these drafts."""
        return cls(Counter(drafts), context, habits, blocks)

    def without(self, draft: str | None) -> Others:
        """Return the rows without one that has this draft."""
        return replace(self, rows=Counter(self.rows) - Counter([draft]))

    def with_(self, draft: str) -> Others:
        """Return the rows with one more that has this draft."""
        return replace(self, rows=Counter(self.rows) + Counter([draft]))

    def priced(self, option: Option, latency: LatencyModel, levels: int) -> Priced:
        """Return the costs of the whole batch, if one more row drafts a chain of at most `levels` by `option`."""
        rows, drafted, written, beside_s = 1, 0.0, 1.0, 0.0
        for name, count in self.rows.items():
            habit = Habit(0.0, 1.0) if name is None else self._habit(name)
            rows, drafted, written = rows + count, drafted + count * habit.drafted, written + count * habit.written
            if name is not None and name != option.source:
                beside_s += self._loop_s(name, 0, latency)
        beside_s += latency.target.per_context * self.context
        lengths = range(1, levels + 1)
        own_s = [self._loop_s(option.source, length, latency, option) for length in lengths]
        target_s = [latency.target.seconds(0, rows + drafted + length) for length in lengths]
        return Priced(written, [beside_s + own + target for own, target in zip(own_s, target_s, strict=True)])

    def _loop_s(self, name: str, length: int, latency: LatencyModel, option: Option | None = None) -> float:
        """Return the seconds of a draft's passes for its rows, and for one more that drafts `length` tokens."""
        count, habit, table = self.rows.get(name, 0), self._habit(name), latency.table_of(name)
        if table is None:
            return latency.draft_free_s
        if name in self.blocks or (latency.at_once if option is None else option.at_once):
            return table.first + table.seconds(0, count * habit.drafted + length)
        seconds, level = table.first * min(1.0, count * min(1.0, habit.drafted) + (length > 0)), 1
        while (tokens := count * min(1.0, max(0.0, habit.drafted - level + 1)) + (level <= length)) > 0:
            seconds += min(1.0, tokens) * table.seconds(0, max(1.0, tokens))
            level += 1
        return seconds

    def _habit(self, name: str) -> Habit:
        return self.habits.get(name, Habit())
