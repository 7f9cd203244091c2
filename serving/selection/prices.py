"""Prices of drafts for the rows of a step, held as long as about as many of these have each draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from distillspec.serving.base.rows import Option
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.selection.batch import Habit, Others, Priced

NEAR = 1 / 16  # of the rows may have another draft before prices are asked for again


class Prices:
    """Tokens a second of the rows of now, by the draft that one of them chooses.

    Args:
        latency: returns the present costs of steps.
        habits: of drafts, by name. They change.
    """

    def __init__(self, latency: Callable[[], LatencyModel], habits: Mapping[str, Habit]) -> None:
        self._latency, self._habits = latency, habits
        self._rows = Others.of((), 0, habits)
        self._held: dict[tuple[str | None, str, bool, int], Priced] = {}
        self._held_for = Counter[str | None]()  # rows by draft

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self._rows.rows.values())

    def see(self, drafts: Sequence[str | None], context: int, blocks: frozenset[str] = frozenset()) -> None:
        """Take the rows of a step.

        Args:
            drafts: of each row, None for one without.
            context: their cached tokens, all together.
            blocks: drafts that draft all tokens in one pass.
        """
        self._rows = Others.of(drafts, context, self._habits, blocks)
        self._follow()

    def change(self, before: str | None, after: str) -> None:
        """Give one row another draft. Rows that choose after it in this step see that."""
        if before != after:
            self._rows = self._rows.without(before).with_(after)
            self._follow()

    def goodput(self, before: str | None, option: Option, survival: Sequence[float], fixed: int | None) -> float:
        """Return the tokens a second if one row drafts by `option`, where it has the draft `before`.

        Args:
            survival, fixed: see `Priced.goodput`.
        """
        key = before, option.source, option.at_once, len(survival)
        if key not in self._held:
            self._held[key] = self._rows.without(before).priced(option, self._latency(), len(survival))
        return self._held[key].goodput(survival, fixed)

    def _follow(self) -> None:
        rows = Counter(self._rows.rows)
        moved = max((rows - self._held_for).total(), (self._held_for - rows).total())
        if moved > NEAR * rows.total():
            self.renew()

    def renew(self) -> None:
        """Ask for costs and habits again."""
        self._held.clear()
        self._held_for = Counter(self._rows.rows)
