"""Verification of many trees at once: levels × siblings, all rows together. Chains are trees of width one.

Where device reads cost time, all levels are launched, and their verdicts are read once with everything else of a step.
Where reads are free (CPUs), only the nodes on the paths are computed: one level after another, up to a rejection.
Verdicts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.serving.base.transfer import to_device, to_host
from distillspec.serving.decoding.tree_batch import NO_NODE, NO_TOKEN, TreeBatch
from distillspec.serving.decoding.tree_rules import Rule
from distillspec.serving.decoding.verdict import TreeVerdict


@dataclass(frozen=True)
class PendingVerdicts:
    """Verdicts under way: `numbers [n]` int64 on the device, and what to make of them once they are read."""

    numbers: Tensor
    verdicts: Callable[[list[int]], list[TreeVerdict]]


class Start(NamedTuple):
    """Where the verification of a tree starts, in rows of logits."""

    row: int  # of the text, or of a node
    first: int  # of the tree


# Verifies trees of a batch by one rule: `verify_by_level` or `verify_all_levels`.
Verify = Callable[[TreeBatch, Sequence[Start], Rule], PendingVerdicts]


def verify_all_levels(batch: TreeBatch, starts: Sequence[Start], rule: Rule) -> PendingVerdicts:
    """Launch all levels. Rows that have ended stay at their last node."""
    widest, depth = batch.widest(), max(tree.depth for tree in batch.trees)
    at = to_device([start.row for start in starts], batch.device)
    alive = torch.ones_like(at, dtype=torch.bool)
    path = []
    for _ in range(depth):
        child = rule.accepted(rule.values(at), at, widest)
        alive = alive & (child >= 0)
        at = torch.where(alive, child, at)
        path.append(torch.where(alive, child, NO_NODE))
    tokens = rule.next_tokens(rule.values(at), at, widest).view(len(starts), -1)
    count = tokens.shape[1]
    numbers = torch.cat([tokens, *(rows[:, None] for rows in path)], 1)

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        return [
            _verdict(row[:count], row[count:], start.first)
            for row, start in zip(_split(read, len(starts)), starts, strict=True)
        ]

    return PendingVerdicts(numbers.flatten(), verdicts)


def verify_by_level(batch: TreeBatch, starts: Sequence[Start], rule: Rule) -> PendingVerdicts:
    """Go down the trees level by level, with a device read after each."""
    at = [start.row for start in starts]
    paths = [list[int]() for _ in starts]
    visited = _Visited(rule, len(starts), batch.device)
    going = [row for row, node in enumerate(at) if batch.child_count[node]]
    while going:
        nodes = [at[row] for row in going]
        values = visited.values(going, nodes)
        children = to_host(rule.accepted(values, to_device(nodes, batch.device), batch.widest(nodes))).tolist()
        for row, child in zip(going, children, strict=True):
            if child != NO_NODE:
                at[row] = child
                paths[row].append(child)
        pairs = zip(going, children, strict=True)
        going = [row for row, child in pairs if child != NO_NODE and batch.child_count[child]]
    tokens = rule.next_tokens(visited.last(at), to_device(at, batch.device), batch.widest(at))

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        next_tokens = _split(read, len(starts))
        return [_verdict(row, path, start.first) for row, path, start in zip(next_tokens, paths, starts, strict=True)]

    return PendingVerdicts(tokens.flatten(), verdicts)


class _Visited:
    """Values of the node that each row visited last. Computing them is most of a verdict."""

    def __init__(self, rule: Rule, rows: int, device: torch.device) -> None:
        self.rule, self.device = rule, device
        self._nodes = [NO_NODE] * rows
        self._values: Tensor | None = None

    def values(self, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Compute the values of `nodes`, which `rows` visit now."""
        values = self.rule.values(to_device(list(nodes), self.device))
        if len(rows) == len(self._nodes) and self._values is None:
            self._values = values
        else:
            if self._values is None:
                self._values = values.new_empty(len(self._nodes), *values.shape[1:])
            self._values.index_copy_(0, to_device(list(rows), self.device), values)
        for row, node in zip(rows, nodes, strict=True):
            self._nodes[row] = node
        return values

    def last(self, at: Sequence[int]) -> Tensor:
        """Return the values of the nodes `at`, one a row, computing those that no `values` has."""
        missing = [row for row, node in enumerate(at) if self._nodes[row] != node]
        if missing:
            self.values(missing, [at[row] for row in missing])
        assert self._values is not None
        return self._values


def _split(read: Sequence[int], rows: int) -> list[Sequence[int]]:
    """Return the numbers of each row."""
    count = len(read) // rows
    return [read[start : start + count] for start in range(0, len(read), count)]


def _verdict(next_tokens: Sequence[int], path: Sequence[int], first: int) -> TreeVerdict:
    """Return a verdict from the target's own tokens and rows of logits: those of the accepted nodes.

    −1: there is no further token, or row.
    """
    token, *others = [token for token in next_tokens if token != NO_TOKEN]
    return TreeVerdict(tuple(row - first - 1 for row in path if row != NO_NODE), token, tuple(others))
