"""Verdicts by rejection sampling on CPUs in one call of C++: chains as a whole, other trees level by level.

Torch takes thirty operations a level, each of which costs as much as the arithmetic. The laws are those of
`decoding.block_verification` and `decoding.verification`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.native.library import NotBuilt
from distillspec.native.verdict_kernel import GivenGroup, GivenTree, VerdictKernel, verdict_kernel
from distillspec.serving.base.tree import DraftProbs, TokenTree
from distillspec.serving.decoding.row_kinds import BLOCK
from distillspec.serving.decoding.tree_batch import NONE
from distillspec.serving.decoding.verification import TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts


@cache
def usable_kernel() -> VerdictKernel | None:
    """Return the kernel, None where it cannot be built."""
    try:
        return verdict_kernel()
    except NotBuilt:
        return None


class DrawnTree(NamedTuple):
    """A tree to verify by rejection sampling, without filters."""

    tree: TokenTree
    row: int  # of the text's logits
    temperature: float  # above 0


def verify_by_kernel(
    logits: Tensor, peaks: Tensor, trees: Sequence[DrawnTree], accept: Tensor, own: Tensor, *, blocks: bool
) -> PendingVerdicts:
    """Verify B trees of n nodes.

    Args:
        logits: `[N, V]` float32 or bfloat16 on the CPU, contiguous in each row.
        peaks: `[N]` float32, the largest of each row, finite.
        accept: `[n]` float64 in [0, 1), one a node.
        own: `[B]` float64 in [0, 1), for the target's own tokens.
        blocks: verify drawn chains as a whole.
    """
    kernel = usable_kernel()
    assert kernel is not None
    found = kernel.judge(logits, peaks, [_given(tree, blocks) for tree in trees], accept, own)

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        width = found.shape[1]
        lines = [read[place : place + width] for place in range(0, len(read), width)]
        return [TreeVerdict(tuple(node for node in path if node != NONE), token) for token, *path in lines]

    return PendingVerdicts(found.flatten(), verdicts)


def _given(drawn: DrawnTree, blocks: bool) -> GivenTree:
    tree = drawn.tree
    groups = [group for group in tree.groups if group.nodes]
    whole = blocks and tree.is_drawn_chain and len(tree) >= BLOCK
    if whole:
        groups.sort(key=lambda group: group.nodes)
    given = [GivenGroup(group.parent, group.nodes, *_table(group.drawn_from, group.row)) for group in groups]
    return GivenTree(drawn.row, tree.tokens, given, whole, drawn.temperature)


def _table(drawn_from: DraftProbs | None, row: int) -> tuple[Tensor | None, int, Tensor | None]:
    if drawn_from is None:
        return None, 0, None
    probs = drawn_from.probs
    if probs.dtype != torch.float32 or probs.stride(1) != 1:
        probs, row = probs[row : row + 1].float().contiguous(), 0
    return probs, row, drawn_from.kept_ids
