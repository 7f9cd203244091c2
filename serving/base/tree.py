"""Token tree: drafted continuations of one sequence. A chain is a tree of width one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

ROOT = -1
Kind = Literal["sampled", "one_hot"]
Source = Literal["draft", "lookup"]


@dataclass(frozen=True)
class TokenTree:
    """Drafted continuations of one sequence.

    `tokens[i]` continues node `parents[i]` (−1: the text so far). Parents come before children, siblings are in draw
    order.

    kind `sampled`: the children of a node were drawn without replacement from `draft_probs[row]`, where `row` is
    `rows[node]`; `rows` has an entry for every node with children, the root as −1. A row is `[width]` float32 over
    the draft's own columns, under the request's policy. `kept_ids` maps columns to ids (None: the whole vocabulary).
    kind `one_hot`: the proposer is deterministic (prompt lookup), without probabilities.
    source: who proposed it. Acceptance of a lookup's tokens says nothing about the draft in use.

    Raises ValueError if a parent follows its child.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    kind: Kind = "one_hot"
    draft_probs: Tensor | None = None  # [expanded nodes, width]
    rows: dict[int, int] | None = None
    kept_ids: Tensor | None = None  # [width] int64
    source: Source = "draft"

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents come before their children")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        draft_probs: Tensor | None = None,
        kept_ids: Tensor | None = None,
        source: Source = "draft",
    ) -> TokenTree:
        """Return a chain. With `draft_probs [len(tokens), width]` it is `sampled`, else `one_hot`."""
        count = len(tokens)
        parents = tuple(range(ROOT, count - 1))
        if draft_probs is None:
            return cls(tuple(tokens), parents, source=source)
        rows = {parent: row for row, parent in enumerate(parents)}
        return cls(tuple(tokens), parents, "sampled", draft_probs, rows, kept_ids, source)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Children of each node (−1: root) in draw order."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in found.items()}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most tokens that could be accepted, 0 for an empty tree."""
        return max(self.depths, default=0)

    def depth_along(self, path: Sequence[int]) -> int:
        """Return the most tokens that could have been accepted after the nodes of `path` were, these included."""
        return len(path) + ((path[-1] if path else ROOT) in self.children)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`, empty for the root."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def shortened(self, depth: int) -> TokenTree:
        """Return the tree without nodes deeper than `depth`. Shallower nodes and probabilities stay."""
        if self.depth <= depth:
            return self
        kept = [node for node, d in enumerate(self.depths) if d <= depth]
        new = {ROOT: ROOT, **{node: place for place, node in enumerate(kept)}}
        rows = None if self.rows is None else {new[node]: row for node, row in self.rows.items() if node in new}
        return TokenTree(
            tuple(self.tokens[node] for node in kept),
            tuple(new[self.parents[node]] for node in kept),
            self.kind,
            self.draft_probs,
            rows,
            self.kept_ids,
            self.source,
        )
