"""Verification of many trees at once: levels × siblings, all rows together. Chains are trees of width one.

Without looks at the device all levels are launched, and their verdicts are read once with everything else of a step.
Where a look costs nothing (CPUs), only the nodes on the paths are computed: one level after another, up to a rejection.
Verdicts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.serving.base.transfer import to_device, to_host
from distillspec.serving.decoding.tree_batch import NONE, TreeBatch
from distillspec.serving.decoding.tree_rules import Rule
from distillspec.serving.decoding.verification import TreeVerdict


@dataclass(frozen=True)
class PendingVerdicts:
    """Verdicts under way: `numbers [n]` int64 on the device, and what to make of them once they are read."""

    numbers: Tensor
    verdicts: Callable[[list[int]], list[TreeVerdict]]


def verify(batch: TreeBatch, members: Sequence[int], rule: Rule, look: bool) -> PendingVerdicts:
    """Verify the trees `members` of a batch by one rule."""
    return _by_level(batch, members, rule) if look else _at_once(batch, members, rule)


def _at_once(batch: TreeBatch, members: Sequence[int], rule: Rule) -> PendingVerdicts:
    """Launch all levels. Rows that have ended stay at their last node."""
    firsts, widest = [batch.firsts[member] for member in members], batch.widest()
    depth = max(batch.trees[member].depth for member in members)
    at = to_device(firsts, batch.device)
    alive = torch.ones_like(at, dtype=torch.bool)
    path = []
    for _ in range(depth):
        child = rule.accepted(rule.values(at), at, widest)
        alive = alive & (child >= 0)
        at = torch.where(alive, child, at)
        path.append(torch.where(alive, child, NONE))
    numbers = torch.stack([rule.next_tokens(rule.values(at), at, widest), *path], 1)

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        own = [read[place : place + 1 + depth] for place in range(0, len(read), 1 + depth)]
        return [_verdict(row[0], row[1:], first) for row, first in zip(own, firsts, strict=True)]

    return PendingVerdicts(numbers.flatten(), verdicts)


def _by_level(batch: TreeBatch, members: Sequence[int], rule: Rule) -> PendingVerdicts:
    """Go down the trees level by level, with a look after each."""
    firsts = [batch.firsts[member] for member in members]
    at, paths = list(firsts), [list[int]() for _ in members]
    visited = _Visited(rule, len(members), batch.device)
    going = [row for row, node in enumerate(at) if batch.child_count[node]]
    while going:
        nodes = [at[row] for row in going]
        values = visited.values(going, nodes)
        children = to_host(rule.accepted(values, to_device(nodes, batch.device), batch.widest(nodes))).tolist()
        for row, child in zip(going, children, strict=True):
            if child != NONE:
                at[row] = child
                paths[row].append(child)
        going = [row for row, child in zip(going, children, strict=True) if child != NONE and batch.child_count[child]]
    tokens = rule.next_tokens(visited.last(at), to_device(at, batch.device), batch.widest(at))

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        return [_verdict(token, path, first) for token, path, first in zip(read, paths, firsts, strict=True)]

    return PendingVerdicts(tokens, verdicts)


class _Visited:
    """Values of the node that each row visited last. Computing them is most of a verdict."""

    def __init__(self, rule: Rule, rows: int, device: torch.device) -> None:
        self.rule, self.device = rule, device
        self._nodes = [NONE] * rows
        self._held: Tensor | None = None

    def values(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Compute the values of `nodes`, which `rows` visit now."""
        values = self.rule.values(to_device(list(nodes), self.device))
        if len(rows) == len(self._nodes) and self._held is None:
            self._held = values
        else:
            if self._held is None:
                self._held = values.new_empty(len(self._nodes), *values.shape[1:])
            self._held.index_copy_(0, to_device(list(rows), self.device), values)
        for row, node in zip(rows, nodes, strict=True):
            self._nodes[row] = node
        return values

    def last(self, at: Sequence[int]) -> Tensor:
        """Return the values of the nodes `at`, one a row, computing those that no `values` has."""
        missing = [row for row, node in enumerate(at) if self._nodes[row] != node]
        if missing:
            self.values(missing, [at[row] for row in missing])
        assert self._held is not None
        return self._held


def _verdict(token: int, path: Sequence[int], first: int) -> TreeVerdict:
    """Return a verdict from rows of logits: those of the accepted nodes, −1 after the last."""
    return TreeVerdict(tuple(row - first - 1 for row in path if row != NONE), token)
