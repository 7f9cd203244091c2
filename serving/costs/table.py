"""Cost table: seconds of one forward pass by its tokens, rows and cached context.

Where a device records passes, tokens are those that a pass computes: the next number on its ladder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy

from distillspec.errors import ConfigError
from distillspec.serving.base.ladder import EXACT, Ladder
from distillspec.types import Floats

# Numbers of tokens that tables are measured and corrected at: close where costs change from flat to rising, and where
# processors that multiply 16 tokens at once take another tile.
KNOTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
ROUNDING = 1e-9  # relative, of sums of seconds
FAR = 1e9  # tokens: no pass is larger


@dataclass(frozen=True)
class CostTable:
    """Seconds of one forward pass over N tokens: an interpolated part, and costs of rows and context added to it.

    Args:
        knots: (tokens, seconds), both ascending. Seconds are linear between two knots, follow the last two beyond them,
            and are those of the first one before it. More tokens never cost less: fewer could be padded to as many.
        per_context: seconds for each cached token of the pass's rows.
        per_row: seconds for each row.
        first: seconds that the first of a draft's passes takes more: it reads weights from memory, and new text.
        recorded: numbers of tokens that passes are recorded in. A pass costs what the number that it runs as costs.

    Raises:
        ConfigError: a number is negative or not finite, knots do not ascend, or there are fewer than two.
    """

    knots: tuple[tuple[float, float], ...]
    per_context: float = 0.0
    per_row: float = 0.0
    first: float = 0.0
    recorded: Ladder = EXACT

    def __post_init__(self) -> None:
        for name in ("per_context", "per_row", "first"):
            _check_seconds(name, getattr(self, name))
        if len(self.knots) < 2:
            raise ConfigError(f"knots={self.knots} must be at least two: one shows no slope")
        before, before_s = -1.0, 0.0
        for tokens, seconds in self.knots:
            if not (before < tokens and before_s <= seconds * (1 + ROUNDING) and seconds < float("inf")):
                raise ConfigError(f"{tokens:g} tokens in {seconds} s cannot follow {before:g} in {before_s} s")
            before, before_s = tokens, seconds

    @classmethod
    def line(cls, per_context: float, per_token: float, fixed: float) -> CostTable:
        """Return the table of a line: per_context · N_context + per_token · N + fixed (SmartSpec, Eq. 7)."""
        _check_seconds("per_token", per_token)
        _check_seconds("fixed", fixed)
        return cls(((0.0, fixed), (1.0, fixed + per_token)), per_context)

    @classmethod
    def rising(
        cls, knots: Iterable[tuple[float, float]], per_context: float = 0.0, per_row: float = 0.0, first: float = 0.0
    ) -> CostTable:
        """Return the table of measured knots. A time below that of fewer tokens is noise, and is lifted to it."""
        tokens, seconds = zip(*knots, strict=True)
        return cls(tuple(zip(tokens, accumulate(seconds, max), strict=True)), per_context, per_row, first)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> CostTable:
        """Return the table that `dataclasses.asdict` made JSON of."""
        knots = tuple((float(tokens), float(seconds)) for tokens, seconds in stored["knots"])
        return cls(
            **{**stored, "knots": knots, "recorded": Ladder(tuple(stored.get("recorded", {"steps": ()})["steps"]))}
        )

    def scaled(self, factor: float) -> CostTable:
        """Return the table of a machine that takes `factor` times as long."""
        knots = tuple([(tokens, factor * seconds) for tokens, seconds in self.knots])
        further = factor * self.per_context, factor * self.per_row, factor * self.first
        return CostTable(knots, *further, self.recorded)

    def seconds(self, context: float, tokens: float, rows: float = 0) -> float:
        """Return the seconds of a pass over `tokens` tokens of `rows` rows, with `context` tokens cached in all.

        What a draft's first pass takes more is not in it.
        """
        return self._at(self.recorded.up(tokens)) + self.per_context * context + self.per_row * rows

    def by_tokens(self, tokens: Floats) -> Floats:
        """Return the interpolated part of the seconds for many numbers of tokens, of any shape."""
        return numpy.asarray(numpy.interp(self.recorded.all_up(tokens), *self._arrays))

    def _at(self, tokens: float) -> float:
        knots = self.knots
        if tokens <= knots[0][0]:
            return knots[0][1]
        place = min(bisect_right(knots, (tokens,)), len(knots) - 1)
        (fewer, less_s), (more, more_s) = knots[place - 1], knots[place]
        return less_s + (more_s - less_s) * (tokens - fewer) / (more - fewer)

    @cached_property
    def _arrays(self) -> Floats:
        """Tokens and seconds of the knots and of a point far beyond them `[2, n + 1]`."""
        return numpy.array([*self.knots, (FAR, self._at(FAR))], dtype=numpy.float64).T


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={value} must be finite and at least 0 seconds")
