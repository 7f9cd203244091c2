"""Draft message: a token tree of one sequence. A chain is a tree of width one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

ROOT = -1
# Sources: the draft model, prompt lookup, earlier answers, earlier logits, counts of n-grams.
DRAFT, LOOKUP, SUFFIX, RECYCLED, NGRAM = "draft", "lookup", "suffix", "recycled", "ngram"
TARGET = "target"  # tokens that the target has drawn: no proposals, see `decoding.target_initialised`
Kind = Literal["drawn", "deterministic"]


@dataclass(frozen=True, eq=False)
class DraftProbs:
    """Distributions that a draft's tokens were drawn from, `probs [rows, width]` float32, under the request's policy.

    `kept_ids [width]` int64 maps columns to ids in ascending order. None: the whole vocabulary. Trees may share one.
    """

    probs: Tensor
    kept_ids: Tensor | None = None


class SiblingGroup(NamedTuple):
    """Children of one node from one source, in the order in which they are tried.

    `drawn`: they were drawn in this order, without replacement, from row `row` of `drawn_from`.
    `deterministic`: the source has no distribution (prompt lookup, an argmax), and `drawn_from` is None.
    """

    parent: int  # node that they continue, −1: the text so far
    nodes: tuple[int, ...]
    source: str = DRAFT
    drawn_from: DraftProbs | None = None
    row: int = 0

    @property
    def kind(self) -> Kind:
        return "deterministic" if self.drawn_from is None else "drawn"


@dataclass(frozen=True)
class TokenTree:
    """Drafted continuations of one sequence: a token for each node, and the groups of siblings.

    Every node is in one group. Parents come before children. The groups of a node are tried in their order here, so a
    token may occur in several of them.

    Raises ValueError if a node is in no group or in two, or if a parent follows its child.
    """

    tokens: tuple[int, ...] = ()
    groups: tuple[SiblingGroup, ...] = ()

    def __post_init__(self) -> None:
        nodes = [node for group in self.groups for node in group.nodes]
        if len(nodes) != len(self.tokens) or set(nodes) != set(range(len(self.tokens))):
            raise ValueError(f"{len(self.tokens)} nodes but sibling groups of nodes {sorted(nodes)}")
        for group in self.groups:
            if group.nodes and not ROOT <= group.parent < min(group.nodes):
                raise ValueError(f"node {min(group.nodes)} has parent {group.parent}; parents come before children")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        drawn_from: DraftProbs | None = None,
        rows: Sequence[int] | None = None,
        source: str = DRAFT,
    ) -> TokenTree:
        """Return a chain. Token i was drawn from row `rows[i]` of `drawn_from`, by default i. None: deterministic."""
        if rows is None:
            rows = range(len(tokens))
        groups = [SiblingGroup(node - 1, (node,), source, drawn_from, row) for node, row in enumerate(rows)]
        return cls(tuple(tokens), tuple(groups))

    @classmethod
    def of_parents(cls, tokens: Sequence[int], parents: Sequence[int], source: str = DRAFT) -> TokenTree:
        """Return a deterministic tree in which node i continues node `parents[i]`, siblings in order of nodes."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        groups = [SiblingGroup(parent, tuple(nodes), source) for parent, nodes in children.items()]
        return cls(tuple(tokens), tuple(groups))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node."""
        found = [ROOT] * len(self.tokens)
        for group in self.groups:
            for node in group.nodes:
                found[node] = group.parent
        return tuple(found)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.tokens) - 1))

    @cached_property
    def is_drawn_chain(self) -> bool:
        """True for a chain whose tokens were all drawn."""
        return self.is_chain and all(group.drawn_from is not None for group in self.groups)

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Children of each node (−1: root) in the order in which they are tried."""
        return {
            parent: tuple(node for group in groups for node in group.nodes)
            for parent, groups in self._groups_by_parent.items()
        }

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node: 1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """The most tokens that could be accepted, 0 for an empty tree."""
        return max(self.depths, default=0)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The first nodes, where these are the target's own tokens. Else empty."""
        return tuple([node for group in self.groups_at(ROOT) if group.source == TARGET for node in group.nodes])

    def groups_at(self, node: int) -> tuple[SiblingGroup, ...]:
        """Return the groups of a node's children, in the order in which they are tried."""
        return self._groups_by_parent.get(node, ())

    @cached_property
    def _groups_by_parent(self) -> dict[int, tuple[SiblingGroup, ...]]:
        found: dict[int, tuple[SiblingGroup, ...]] = {}
        for group in self.groups:
            found[group.parent] = (*found.get(group.parent, ()), group)
        return found

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`, empty for the root."""
        return path_to(node, self.parents)

    def shortened(self, depth: int) -> TokenTree:
        """Return the tree without nodes deeper than `depth`. Shallower nodes and probabilities stay."""
        if self.depth <= depth:
            return self
        return self.of_nodes([node for node, d in enumerate(self.depths) if d <= depth])

    @cached_property
    def first_path(self) -> tuple[int, ...]:
        """The nodes that are each the first child of the one before, from the root down."""
        path: list[int] = []
        while children := self.children.get(path[-1] if path else ROOT):
            path.append(children[0])
        return tuple(path)

    def first_path_first(self) -> TokenTree:
        """Return the tree with its first children first, down from the root.

        They stand in their places if all of them are accepted: nothing is moved then.
        """
        first = self.first_path
        if first == tuple(range(len(first))):
            return self
        return self.of_nodes([*first, *sorted(set(range(len(self))) - set(first))])

    def of_nodes(self, kept: Sequence[int]) -> TokenTree:
        """Return the tree of the nodes `kept`, in their order. With a node its parent and whole group are kept."""
        new = {ROOT: ROOT, **{node: place for place, node in enumerate(kept)}}
        groups = [
            group._replace(parent=new[group.parent], nodes=tuple(new[node] for node in group.nodes))
            for group in self.groups
            if all(node in new for node in group.nodes)
        ]
        return TokenTree(tuple(self.tokens[node] for node in kept), tuple(groups))


def path_to(node: int, parents: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes from the root's child down to `node`, given the parent of each."""
    nodes: list[int] = []
    while node != ROOT:
        nodes.append(node)
        node = parents[node]
    return tuple(reversed(nodes))


def merged(trees: Sequence[TokenTree]) -> TokenTree:
    """Return one tree of all, joined at the root. Groups of earlier trees are tried first, and duplicates stay.

    What follows a duplicate goes on behind the first node of the same text: verification never comes to the duplicate.
    """
    if len(trees) == 1:
        return trees[0]
    tokens: list[int] = []
    groups: list[SiblingGroup] = []
    earlier: dict[tuple[int, int], int] = {}  # nodes by parent and token, of the trees before
    for tree in trees:
        first = len(tokens)
        new_parents = {ROOT: ROOT}  # by the tree's node: where its children go
        known = dict(earlier)
        for group in sorted(tree.groups, key=lambda group: min(group.nodes, default=0)):
            parent = new_parents[group.parent]
            for node in group.nodes:
                key = (parent, tree.tokens[node])
                new_parents[node] = earlier.get(key, first + node)
                known.setdefault(key, first + node)
            placed = tuple([first + node for node in group.nodes])
            groups.append(group._replace(parent=parent, nodes=placed))
        tokens += tree.tokens
        earlier = known
    return TokenTree(tuple(tokens), tuple(groups))
