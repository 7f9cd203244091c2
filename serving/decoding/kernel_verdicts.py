"""Verdicts on CPUs in one call of C++: drawn chains as a whole, other drawn trees from their leaves to the root.

Seeded trees are verified by choice, those of which nothing was drawn level by level.

Torch takes thirty operations a level, each of which costs as much as the arithmetic. The laws are those of
`decoding.block_verification`, `decoding.traversal`, `decoding.noise` and `decoding.reference_verification`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.native.library import NotBuilt
from distillspec.native.verdict_kernel import (
    Chances,
    GivenGroup,
    GivenTree,
    VerdictKernel,
    Way,
    verdict_kernel,
)
from distillspec.serving.base.tree import DraftProbs, TokenTree
from distillspec.serving.decoding.row_kinds import BLOCK
from distillspec.serving.decoding.tree_batch import NO_NODE
from distillspec.serving.decoding.verdict import TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts
from distillspec.types import SamplingPolicy


@cache
def usable_kernel() -> VerdictKernel | None:
    """Return the kernel, None where it cannot be built."""
    try:
        return verdict_kernel()
    except NotBuilt:
        return None


class JudgedTree(NamedTuple):
    """A tree to verify."""

    tree: TokenTree
    row: int  # of the text's logits
    policy: SamplingPolicy  # not greedy
    seeded: bool = False


def verify_by_kernel(
    kernel: VerdictKernel, logits: Tensor, peaks: Tensor, trees: Sequence[JudgedTree], chances: Chances, *, paths: bool
) -> PendingVerdicts:
    """Verify B trees.

    Args:
        logits: `[N, V]` float32 or bfloat16 on the CPU, contiguous in each row.
        peaks: `[N]` float32, the largest of each row, finite.
        paths: verify whole paths of drawn tokens, not token by token.
    """
    judged = kernel.judge(logits, peaks, [_given(tree, paths) for tree in trees], chances)
    width = judged.shape[1]

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        lines = [read[start : start + width] for start in range(0, len(read), width)]
        return [TreeVerdict(tuple(node for node in path if node != NO_NODE), token) for token, *path in lines]

    return PendingVerdicts(judged.flatten(), verdicts)


def _given(judged: JudgedTree, paths: bool) -> GivenTree:
    tree, way = judged.tree, _way(judged, paths)
    groups = [group for group in tree.groups if group.nodes]
    if way == Way.AS_A_WHOLE:
        groups.sort(key=lambda group: group.nodes)
    given = [GivenGroup(group.parent, group.nodes, *_table(group.drawn_from, group.row)) for group in groups]
    return GivenTree(judged.row, tree.tokens, given, way, judged.policy)


def _way(judged: JudgedTree, paths: bool) -> Way:
    """Return how a tree is verified. Where nothing was drawn, whole paths gain nothing."""
    tree = judged.tree
    if judged.seeded:
        return Way.BY_CHOICE
    if not paths or tree.depth < BLOCK or all(group.drawn_from is None for group in tree.groups):
        return Way.BY_LEVEL
    return Way.AS_A_WHOLE if tree.is_drawn_chain else Way.FROM_THE_LEAVES


def _table(drawn_from: DraftProbs | None, row: int) -> tuple[Tensor | None, int, Tensor | None]:
    if drawn_from is None:
        return None, 0, None
    probs = drawn_from.probs
    if probs.dtype != torch.float32 or probs.stride(1) != 1:
        probs, row = probs[row : row + 1].float().contiguous(), 0
    return probs, row, drawn_from.kept_ids
