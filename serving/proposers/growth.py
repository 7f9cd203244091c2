"""Growth of one row's tree in the shape that was planned for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import DRAFT, ROOT, TARGET, DraftProbs, SiblingGroup, TokenTree, path_to
from distillspec.serving.decoding.logits import Place
from distillspec.serving.proposers.read_texts import DraftState
from distillspec.serving.proposers.tree_readers import tree_readers


class TreePolicy(NamedTuple):
    """Choice of the nodes of a draft's trees.

    most_probable: the most probable tokens, in their order, where others would be drawn.
    width: the most confident nodes (`DynamicGrowth`), with so many children each. None: the nodes of the planned shape.
        With `most_probable` alone.
    """

    most_probable: bool = False
    width: int | None = None


PLANNED = TreePolicy()  # drawn tokens in the planned shape


@dataclass(eq=False)
class Growth:
    """A tree that grows. Its nodes are numbered in the order in which they were drafted.

    Attributes:
        sequence, state: the row, and what the draft keeps of it.
        shape: as planned. Children of a stop token are left out, and so are siblings that have no probability.
        frontier: nodes whose children are drafted next, −1 for the text.
        read: nodes that the draft has read or reads next, in the order of their places in its cache.
        carried: by node that was read, what the draft carries behind it.
        parents: by node, −1 for the text.
        guess, ahead: tokens that were read with the text, and what the draft carries behind each. For chains, with
            siblings or without.
    """

    sequence: SequenceState
    state: DraftState
    shape: TreeShape
    tokens: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    read: list[int] = field(default_factory=list)
    carried: dict[int, Tensor] = field(default_factory=dict)
    parents: list[int] = field(default_factory=list)
    guess: tuple[int, ...] = ()
    ahead: Sequence[Tensor] = ()
    _groups: list[SiblingGroup] = field(default_factory=list)
    _level: int = 0
    _shaped: list[int] = field(default_factory=lambda: [0])  # place of each frontier node in its level of the shape

    @property
    def slot(self) -> int:
        return self.sequence.held_slot

    @property
    def is_drawn(self) -> bool:
        """True if tokens are drawn for it. Those of greedy and seeded rows are judged by choice."""
        return self.sequence.params.draws

    @property
    def children(self) -> list[int]:
        """The most children of each frontier node."""
        return [self.shape.levels[self._level][place] for place in self._shaped]

    def place(self, node: int) -> Place:
        """Return the position behind a node."""
        return Place(self.sequence, tuple(self.tokens[each] for each in path_to(node, self.parents)))

    def add(
        self,
        chosen: Sequence[Sequence[int]],
        rows: Sequence[int],
        goes_on: Sequence[bool] = (),
        scores: Sequence[Sequence[float]] = (),
    ) -> None:
        """Add the children of the frontier, and go on to those that have children in the shape.

        Args:
            chosen: tokens behind each frontier node, at least as many as its children. −1: there is no further one.
            rows: the row of each node's distribution in the table that `tree` gets.
            goes_on: False: nothing is drafted behind a frontier node's children. Empty: all go on.
            scores: log q of `chosen`, for trees whose shape follows them.
        """
        level, below = self.shape.levels[self._level], self._below()
        frontier: list[int] = []
        shaped: list[int] = []
        for number, (node, place) in enumerate(zip(self.frontier, self._shaped, strict=True)):
            children = self._add_children(node, chosen[number][: level[place]], rows[number])
            if goes_on and not goes_on[number]:
                continue
            for shape_place, child in enumerate(children, sum(level[:place])):
                if below[shape_place] and self._may_go_on(child):
                    frontier.append(child)
                    shaped.append(shape_place)
        self._level, self.frontier, self._shaped = self._level + 1, frontier, shaped
        self.read += frontier

    def fill(self, tokens: Sequence[int], finite: Sequence[bool], rows: Sequence[int]) -> bool:
        """Add all nodes of the shape at once. Return False if a reader's logits are NaN: nothing is added from it on.

        Args:
            tokens: of the shape's nodes, level by level. −1: there is no further sibling.
            finite, rows: of each reader (`tree_readers`), its logits, and the row of its distribution in the table.
        """
        new = {ROOT: ROOT}
        for number, reader in enumerate(reader for level in tree_readers(self.shape) for reader in level):
            node = new.get(reader.node)
            if node is None or (node != ROOT and not self._may_go_on(node)):
                continue
            if not finite[number]:
                return False
            if node != ROOT and number == len(self.read) + 1:  # in its place behind the text, if none is missing
                self.read.append(node)
            below = range(reader.first, reader.first + reader.children)
            children = self._add_children(node, tokens[reader.first : below.stop], rows[number])
            new.update(zip(below, children, strict=False))  # those without a token are the last ones
        self.frontier = []
        return True

    def _add_children(self, node: int, tokens: Sequence[int], row: int) -> range:
        """Add the children of a node, up to the first −1, and return them. The target's candidates come first."""
        given = self.sequence.candidates[: len(tokens)] if node == ROOT else ()
        chosen = given or [token for token in tokens if token >= 0]
        children = range(len(self.tokens), len(self.tokens) + len(chosen))
        self.tokens += chosen
        self.parents += [node] * len(chosen)
        self._groups.append(SiblingGroup(node, tuple(children), TARGET if given else DRAFT, row=row))
        return children

    def _may_go_on(self, node: int) -> bool:
        """Return False for a token that ends the answer."""
        return self.tokens[node] not in self.sequence.stop_ids

    def is_read_ahead(self) -> bool:
        """Take what the draft carries behind the frontier from the guess. Return False if it guessed other tokens."""
        if self._level > len(self.guess):
            return False
        (node,) = self.frontier
        if self.place(node).drafted != self.guess[: self._level]:
            return False
        self.carried[node] = self.ahead[self._level - 1]
        return True

    def stop(self) -> None:
        """Draft nothing further."""
        self.frontier = []

    def tree(self, table: DraftProbs | None, source: str = DRAFT) -> TokenTree:
        """Return what has grown, with the distributions that it was drawn from: None if it was not."""
        groups = [
            group if group.source == TARGET else group._replace(source=source, drawn_from=table)
            for group in self._groups
        ]
        return TokenTree(tuple(self.tokens), tuple(groups)).first_path_first()

    def note_read(self) -> None:
        """Keep what the draft has read of the tree from its first place on: first children, down from the root."""
        drafted: list[int] = []
        parent = ROOT
        for node in self.read:
            if self.parents[node] != parent or node != self._first_child(parent):
                break
            drafted.append(self.tokens[node])
            parent = node
        self.state.drafted = tuple(drafted)

    def _first_child(self, parent: int) -> int:
        return next(group.nodes[0] for group in self._groups if group.parent == parent)

    def _below(self) -> Sequence[int]:
        """Return the children of each node of the next level of the shape."""
        level = self._level + 1
        return self.shape.levels[level] if level < self.shape.depth else [0] * sum(self.shape.levels[self._level])


class DynamicGrowth(Growth):
    """A tree of the most confident nodes, by the product of the draft's probabilities along their paths (EAGLE-2).

    Each level goes on behind its `width` best nodes, with `width` children each. Of all, the best are kept, as many as
    the shape has nodes. What was drawn would be chosen by its own value, so this is for tokens that are not.
    """

    def __init__(self, sequence: SequenceState, state: DraftState, shape: TreeShape, width: int) -> None:
        super().__init__(sequence, state, shape)
        self.width, self._scores = width, list[float]()

    @property
    def children(self) -> list[int]:
        return [self.width] * len(self.frontier)

    def add(
        self,
        chosen: Sequence[Sequence[int]],
        rows: Sequence[int],
        goes_on: Sequence[bool] = (),
        scores: Sequence[Sequence[float]] = (),
    ) -> None:
        added: list[int] = []
        for number, node in enumerate(self.frontier):
            children = self._add_children(node, chosen[number][: self.width], rows[number])
            before = 0.0 if node == ROOT else self._scores[node]
            self._scores += [before + score for score in scores[number][: len(children)]]
            if not goes_on or goes_on[number]:
                added += filter(self._may_go_on, children)
        self._level += 1
        best = sorted(added, key=lambda node: -self._scores[node])[: self.width]
        self.frontier = sorted(best) if self._level < self.shape.depth else []
        self.read += self.frontier

    def tree(self, table: DraftProbs | None, source: str = DRAFT) -> TokenTree:
        """See `Growth.tree`. A child's score is never above its parent's, so paths stay whole."""
        best = sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))[: self.shape.nodes]
        kept = sorted(best)
        new = {ROOT: ROOT, **{node: place for place, node in enumerate(kept)}}
        parents = [new[self.parents[node]] for node in kept]
        return TokenTree.of_parents([self.tokens[node] for node in kept], parents, source).first_path_first()
