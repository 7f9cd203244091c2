"""Offers of sources to rows, at a price, and the choices among them."""

from __future__ import annotations

from typing import NamedTuple

from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.grown_trees import NO_TREE


class Offer(NamedTuple):
    """Tree that a source would draft for a row, with its value."""

    value: float  # tokens, less the cost at the price
    option: Option
    shape: TreeShape = NO_TREE
    tokens: float = 0.0  # expected to be accepted

    def and_then(self, behind: Offer) -> Offer:
        """Return the offer of a draft's tree behind these nodes."""
        return behind._replace(value=self.value + behind.value, tokens=self.tokens + behind.tokens)


class Chosen(NamedTuple):
    """Source and tree chosen for a row."""

    row: RowView  # with the source alone, and the likely nodes that are drafted
    shape: TreeShape = NO_TREE  # of the source's own tree
    tokens: float = 0.0  # expected to be accepted
    gain: float = 0.0  # tokens by which named nodes are worth more than the best without them

    @property
    def drafts(self) -> bool:
        """True if a draft drafts for the row."""
        return self.row.drafted_by_model and self.shape.depth > 0

    @property
    def joined(self) -> int:
        """Likely nodes that a draft's tree is behind."""
        return len(self.row.likely.chances) if self.row.drafted_by_model and self.row.likely is not None else 0

    def first(self, count: int) -> Chosen:
        """Return the same with at most so many likely nodes."""
        nodes = self.row.likely
        if nodes is None or count >= len(nodes.chances):
            return self
        kept = nodes.first(count)
        tokens, gain = self.tokens - (nodes.tokens - kept.tokens), self.gain * kept.tokens / nodes.tokens
        if self.row.drafted_by_model:
            return self._replace(row=self.row._replace(likely=kept if count else None), tokens=tokens, gain=gain)
        return Chosen(self.row._replace(likely=kept), kept.shape, tokens, gain)


class PricedPlan(NamedTuple):
    """A step: what is drafted for each row, and what it is expected to give."""

    chosen: tuple[Chosen, ...]
    allocation: Allocation

    @property
    def gain(self) -> float:
        """Tokens by which named nodes are worth more than the best without them, as a share of all tokens."""
        return sum([each.gain for each in self.chosen]) / max(1.0, self.allocation.tokens)
