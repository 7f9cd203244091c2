"""Rows of a batch with the drafts that they have: what one row's choice of a draft brings the whole of it.

Drafts run one after another. A draft that no other row has costs its passes for one row alone, and all rows wait. So a
row's best draft depends on those of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distillspec.serving.control.base import Option
from distillspec.serving.costs.latency import LatencyModel

RATE = 0.05  # of the averages over steps


class Habit(NamedTuple):
    """Averages of a row of a draft over steps: tokens drafted, and tokens written."""

    drafted: float = 2.0
    written: float = 1.6

    def after(self, drafted: int, written: int) -> Habit:
        """Return the average with one more row."""
        return Habit(self.drafted + RATE * (drafted - self.drafted), self.written + RATE * (written - self.written))


@dataclass(frozen=True)
class Others:
    """The other rows of a batch.

    rows: how many there are, by draft. None: without one.
    context: cached tokens of all rows, the one that chooses too.
    habits: of drafts, by name.
    """

    rows: Mapping[str | None, int]
    context: int
    habits: Mapping[str, Habit]

    @classmethod
    def of(cls, drafts: Iterable[str | None], context: int, habits: Mapping[str, Habit]) -> Others:
        """Return the rows that have these drafts."""
        return cls(Counter(drafts), context, habits)

    def goodput(
        self, survival: Sequence[float], option: Option, latency: LatencyModel, fixed: int | None = None
    ) -> float:
        """Return the most tokens a second of the whole batch, if one more row drafts a chain by `option`.

        Args:
            survival: P(the first 1, 2, … tokens of the chain are all accepted). No longer chain is possible.
            fixed: the only length, None for the best one.
        """
        rows, drafted, written, beside_s = 1, 0.0, 1.0, 0.0
        for name, count in self.rows.items():
            habit = Habit(0.0, 1.0) if name is None else self._habit(name)
            rows, drafted, written = rows + count, drafted + count * habit.drafted, written + count * habit.written
            if name is not None and name != option.source:
                beside_s += self._loop_s(name, 0, latency)
        beside_s += latency.target.per_context * self.context
        best = 0.0
        for length, survives in enumerate(survival, 1):
            written += survives
            if fixed is None or length == min(fixed, len(survival)):
                target_s = latency.target.seconds(0, rows + drafted + length)
                best = max(best, written / (target_s + beside_s + self._loop_s(option.source, length, latency, option)))
        return best

    def _loop_s(self, name: str, length: int, latency: LatencyModel, option: Option | None = None) -> float:
        """Return the seconds of a draft's passes for its rows, and for one more that drafts `length` tokens."""
        count, habit = self.rows.get(name, 0), self._habit(name)
        own = latency.of_draft(option.at_once if option is not None else latency.at_once, name)
        if own.draft is None:
            return latency.draft_free_s
        if own.at_once:
            return own.draft.first + own.draft.seconds(0, count * habit.drafted + length)
        seconds, level = own.draft.first * min(1.0, count * min(1.0, habit.drafted) + (length > 0)), 1
        while (tokens := count * min(1.0, max(0.0, habit.drafted - level + 1)) + (level <= length)) > 0:
            seconds += min(1.0, tokens) * own.draft.seconds(0, max(1.0, tokens))
            level += 1
        return seconds

    def _habit(self, name: str) -> Habit:
        return self.habits.get(name, Habit())
