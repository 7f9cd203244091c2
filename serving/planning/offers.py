"""Offers of sources to rows, at a price, and the plans that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from distillspec.serving.base.rows import RowView, is_joined
from distillspec.serving.base.shape import NO_TREE, TreeShape
from distillspec.serving.costs.chain_batch import Expected


class Offer(NamedTuple):
    """Tree that a source drafts for a row, alone or behind likely nodes."""

    row: RowView  # with the source alone, and the likely nodes that are drafted
    shape: TreeShape = NO_TREE  # of the source's own tree
    tokens: float = 0.0  # expected to be accepted
    value: float = 0.0  # tokens, less the cost at the price
    gain: float = 0.0  # tokens by which likely nodes are worth more than the best without them

    @classmethod
    def nothing(cls, row: RowView) -> Offer:
        """Return the choice to draft nothing."""
        return cls(row._replace(others=(), likely=None) if row.others or row.likely is not None else row)

    @property
    def drafts(self) -> bool:
        """True if a draft drafts for the row."""
        return self.row.drafted_by_model and self.shape.depth > 0

    @property
    def nodes(self) -> int:
        """All drafted tokens, with likely nodes that a draft's tree is behind."""
        behind = self.row.likely if is_joined(self.row) else None
        return self.shape.nodes + (0 if behind is None else len(behind.chances))

    def first(self, count: int) -> Offer:
        """Return the same with at most so many likely nodes."""
        nodes = self.row.likely
        if nodes is None or count >= len(nodes.chances):
            return self
        kept = nodes.first(count)
        tokens = self.tokens - (nodes.tokens - kept.tokens)
        gain = self.gain * kept.tokens / nodes.tokens
        if not self.row.drafted_by_model:
            return Offer(self.row._replace(likely=kept), kept.shape, tokens, gain=gain)
        return Offer(self.row._replace(likely=kept if count else None), self.shape, tokens, gain=gain)


class StepPlan(NamedTuple):
    """A step: what is drafted for each row, and what it is expected to give."""

    chosen: tuple[Offer, ...]
    expected: Expected

    @property
    def nodes(self) -> int:
        """Drafted tokens."""
        return sum([each.nodes for each in self.chosen])

    @property
    def drafted(self) -> Counter[str]:
        """Drafted tokens of each source."""
        return by_source([(each.row.source, each.nodes) for each in self.chosen])

    @property
    def goodput(self) -> float:
        """Expected tokens a second."""
        return self.expected.goodput

    @property
    def depths(self) -> list[int]:
        """Levels of each row's own tree."""
        return [each.shape.depth for each in self.chosen]

    @property
    def gain(self) -> float:
        """Tokens by which likely nodes are worth more than the best without them, as a share of all tokens."""
        return sum([each.gain for each in self.chosen]) / max(1.0, self.expected.tokens)


def choose(row: RowView, offers: Sequence[Offer], without: Collection[str] = (), *, second: bool = False) -> Offer:
    """Return the best offer to a row, or the second best one, if any is worth its cost.

    Args:
        offers: the best ones first.
        without: drafts that do not run.
    """
    running = [offer for offer in offers if not (offer.row.drafted_by_model and offer.row.source in without)]
    if not running:
        return Offer.nothing(row)
    chosen = running[1] if second and len(running) > 1 else running[0]
    if chosen.value <= 0 and not second:
        return Offer.nothing(row)
    value_without_likely = max([0.0, *[offer.value for offer in running if offer.row.likely is None]])
    return chosen._replace(gain=max(0.0, chosen.value - value_without_likely))


def by_source(nodes: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return the sums of nodes, given by source."""
    sums = Counter[str]()
    for source, count in nodes:
        sums[source] += count
    return sums
