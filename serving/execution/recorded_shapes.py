"""Shapes that passes are recorded in: which one a pass runs as, and which are recorded before traffic.

Linear layers compute `tokens`. Only attention knows rows, tokens a row and keys read a row. Its rectangle is padded
more coarsely: in the kernel made for it, rows that only pad read no keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from distillspec.models.ragged_attention import is_ragged
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.ladder import EXACT, Ladder
from distillspec.serving.execution.host_batch import HostBatch

WIDEST = 16  # tokens a row. Longer reads are prompts and are not recorded
SHORTEST_REACH = 256  # keys read a row, where attention reads as many of every row. Doubled from here on
OWN_REACH, OWN_FACTOR = 1024, 4  # the same where each row's own keys are read, and the number only splits the work


@dataclass(frozen=True)
class PassShape:
    """Tokens of a pass, and of its attention: rows, tokens a row, keys read a row."""

    tokens: int
    rows: int
    width: int
    reach: int


@dataclass(frozen=True)
class RecordedShapes:
    """Ladders that a pass's numbers are rounded up to. Passes beyond one of them are not recorded, nor are trees.

    Attributes:
        tokens: of a pass. None: as many as its attention's rectangle has.
        rows, widths, reaches: rows, tokens a row and keys read a row of that rectangle.
    """

    tokens: Ladder | None
    rows: Ladder
    widths: Ladder
    reaches: Ladder

    @classmethod
    def of_target(cls, cache: SlotCache, speculation_length: int) -> RecordedShapes:
        """Return the shapes of decoding passes: single tokens, and windows of up to so many drafted ones."""
        longest = min(1 + speculation_length, WIDEST)
        widths = Ladder(tuple(sorted({1, longest})))
        return cls(Ladder.tokens(cache.slots * longest), Ladder.doubling(cache.slots), widths, _reaches(cache))

    @classmethod
    def of_draft(cls, cache: SlotCache) -> RecordedShapes:
        """Return the shapes of a draft's passes, which read what is unread of each row, and then a token a row.

        Those passes compute as many tokens as rows, so rows have the small steps of tokens. The first one's tokens are
        no step of their own: a whole loop is one recording, by this shape and by what is drawn.
        """
        rows = Ladder.tokens(cache.slots)
        rows = Ladder((*(step for step in rows.steps if step < cache.slots), cache.slots))
        return cls(None, rows, Ladder.doubling(WIDEST), _reaches(cache))

    def shape(self, batch: HostBatch, reach: int) -> PassShape | None:
        """Return the shape that a pass which reads `reach` keys a row runs as, None for one that is not recorded.

        The rows are those of all slots up to the last one that the pass reads.
        """
        if any(group.wide for group in batch.groups):
            return None
        last, width = 1 + max(row.slot for row in batch.rows), max(group.width for group in batch.groups)
        tokens = len(batch)
        if width > self.widths.last or (self.tokens is not None and tokens > self.tokens.last):
            return None
        rows, width = self.rows.up(last), self.widths.up(width)
        return PassShape(self._tokens(tokens, rows * width), rows, width, self.reaches.up(reach))

    def _tokens(self, count: int, rectangle: int) -> int:
        return rectangle if self.tokens is None else self.tokens.up(count)

    def ahead(self, most: int) -> list[PassShape]:
        """Return at most `most` shapes to record before traffic, the largest first: later ones share their memory.

        Every number of tokens of neighbouring rows from the first slot on, short contexts and single tokens before
        others.
        """
        shapes, tokens = list[PassShape](), self.tokens or EXACT
        for reach, width in product(self.reaches.steps, self.widths.steps):
            fewer = 0
            for rows in self.rows.steps:
                # In a batch of rows some may have one token, and of windows at least one has more.
                least, largest = fewer + 1 + (width > 1), rows * width
                steps = [step for step in tokens.steps if tokens.up(least) <= step <= tokens.up(largest)]
                shapes += [PassShape(step, rows, width, reach) for step in steps]
                fewer = rows
        return sorted(shapes[:most], key=lambda shape: (shape.reach, shape.tokens, shape.rows), reverse=True)


def _reaches(cache: SlotCache) -> Ladder:
    """Return the keys a row that attention is recorded for."""
    if is_ragged(cache.attend):
        return Ladder.doubling(cache.max_len, min(OWN_REACH, cache.max_len), OWN_FACTOR)
    return Ladder.doubling(cache.max_len, min(SHORTEST_REACH, cache.max_len))
