"""Nodes that a source without a model names for a row, the likeliest first, with their chances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count

from distillspec.serving.base.likely import FEW_ROWS, LikelyNodes
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import ROOT

MOST_NODES = 12  # of a row's tree
ALL_NODES = 128  # of all rows together: growing a node takes microseconds
LEAST_CHANCE = 0.03  # of a node that is named
# Growing nodes that are not drafted takes time. So the least chance that is named follows what is drafted, beside more
# than a few rows: it goes a step towards a share of the first chance that was not drafted, or down where all were.
NAMED_BELOW, NAMED_STEP, NAMED_MORE = 0.7, 0.2, 0.9

Drafted = tuple[int, ...]  # tokens behind a text


class LikelyGrowth:
    """Grows the nodes of a source.

    Args:
        depth: the most levels.
        nodes: the most nodes of a row.
        wide: False: chains alone.
    """

    def __init__(self, source: str, depth: int, nodes: int, *, wide: bool) -> None:
        self.source, self.depth, self.nodes, self.wide = source, depth, nodes, wide
        self._floor = LEAST_CHANCE  # of chances that are named
        self._named: dict[str, tuple[float, ...]] = {}  # by sequence, chances of the nodes that were named last

    def grow(
        self, sequence: SequenceState, behind: Callable[[Drafted], Mapping[int, float]], kept: float, rows: int
    ) -> LikelyNodes:
        """Return the nodes of the highest chances, best first.

        Args:
            behind: returns what may follow the text and these drafted tokens, the best first, with its shares.
            kept: accepted tokens over those that shares expect.
            rows: whose nodes are grown in this step.
        """
        floor = LEAST_CHANCE if rows <= FEW_ROWS else self._floor
        most = max(2, min(self.nodes, ALL_NODES // max(1, rows)))
        chances, parents, depths = list[float](), list[int](), list[int]()
        waiting, order = list[tuple[float, int, int, Drafted]](), count()  # −chance, order, parent, drafted tokens

        def put(path: Drafted, parent: int, chance: float) -> None:
            best = behind(path)
            for token, share in list(best.items())[: None if self.wide else 1]:
                if (token_chance := chance * min(1.0, kept * share)) >= floor:
                    heappush(waiting, (-token_chance, next(order), parent, (*path, token)))

        put((), ROOT, 1.0)
        while waiting and len(chances) < most:
            negative, _, parent, path = heappop(waiting)
            chances.append(-negative)
            parents.append(parent)
            depths.append(len(path))
            goes_on = -negative * min(1.0, kept) >= floor  # else no share is large enough behind it
            if goes_on and len(path) < self.depth and path[-1] not in sequence.stop_ids:
                put(path, len(chances) - 1, -negative)
        self._named[sequence.id] = tuple(chances)
        return LikelyNodes(self.source, tuple(chances), tuple(parents), tuple(depths))

    def follow(self, sequence_id: str, drafted: int) -> None:
        """Name fewer nodes where not all were drafted, and more where all were, or none was named."""
        named = self._named.pop(sequence_id, None)
        if named is None:
            return
        if drafted < len(named):
            self._floor += NAMED_STEP * (max(LEAST_CHANCE, NAMED_BELOW * named[drafted]) - self._floor)
        else:
            self._floor = max(LEAST_CHANCE, NAMED_MORE * self._floor)

    def forget(self, sequence_id: str) -> None:
        """Drop a sequence that does not come back."""
        self._named.pop(sequence_id, None)
