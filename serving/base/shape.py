"""Shapes of drafted trees, as plans ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from distillspec.serving.base.tree import DRAFT


@dataclass(frozen=True)
class TreeShape:
    """A full tree: `widths[i]` children under every node of level i. (1, 1, 1) is a chain of three tokens."""

    widths: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Levels: the most tokens that could be accepted."""
        return len(self.widths)

    @cached_property
    def nodes(self) -> int:
        """Drafted tokens: Σ_h Π_{i ≤ h} k_i. (3, 2, 2) has 3 + 6 + 12 = 21."""
        nodes, level = 0, 1
        for width in self.widths:
            level *= width
            nodes += level
        return nodes


class PlannedTree(NamedTuple):
    """A tree to be drafted by one source."""

    source: str
    shape: TreeShape


@cache
def chain_of(speculation_length: int, source: str = DRAFT) -> tuple[PlannedTree, ...]:
    """Return the plan of one chain, empty for length 0."""
    return (PlannedTree(source, TreeShape((1,) * speculation_length)),) if speculation_length else ()
