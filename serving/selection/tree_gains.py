"""Trees of one draft that pay at a price: tokens, nodes and reads by levels and by the chance that a token is accepted.

A controller keeps the nodes of a tree whose chance to be on the accepted path exceeds what a node must bring (see
`planning.best_trees`). A selection prices many rows and drafts, so this is tabled by the chance and interpolated.
"""

from __future__ import annotations

import numpy

from distillspec.serving.costs.known import KnownTrees
from distillspec.types import Floats

INTERVALS = 64  # of the chance, in the table

TOKENS, NODES, READS = range(3)


class TreeGains:
    """Table of a draft's trees.

    Args:
        trees: that the controller chooses from.
        relative: `[levels]`, acceptance of each position over that of all.
        least: tokens that a node must bring.
    """

    def __init__(self, trees: KnownTrees, relative: Floats, least: float) -> None:
        nodes, shares = trees
        levels = numpy.arange(1, nodes.depth + 1)
        means = numpy.linspace(0.0, 1.0, INTERVALS + 1)[:, None]
        first = numpy.minimum(1.0, means * relative[: nodes.depth])[..., None]  # of each level's first sibling
        chances = numpy.concatenate([first, (1 - first) * shares[: nodes.depth]], 2)
        survival = nodes.survival(numpy.minimum.accumulate(chances, 2))  # siblings are tried in turn
        kept, inside = survival > least, (nodes.depths[:, None] <= levels).astype(float)
        self._table = numpy.stack([(survival * kept) @ inside, kept @ inside, (kept & nodes.firsts) @ inside])

    def at(self, chance: float) -> Floats:
        """Return tokens, nodes, and texts and nodes that the draft reads `[3, levels]`, of trees of 1 … L levels."""
        scaled = min(max(chance, 0.0), 1.0) * INTERVALS
        below = min(int(scaled), INTERVALS - 1)
        low, high = self._table[:, below], self._table[:, below + 1]
        gains: Floats = low + (scaled - below) * (high - low)
        return gains
