"""Verdicts where the target's own token is known behind every node (greedy): a walk on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.verdict import TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts


def verify_choices(trees: Sequence[TokenTree], ids: Tensor) -> PendingVerdicts:
    """Accept the first child that is the target's own token, down from each root.

    `ids [Σ (1 + len(tree))]` int64: the target's own token behind each text, and behind each of its nodes.
    """
    ends = list(accumulate(1 + len(tree) for tree in trees))

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        return [_walk(tree, read[end - 1 - len(tree) : end]) for tree, end in zip(trees, ends, strict=True)]

    return PendingVerdicts(ids, verdicts)


def _walk(tree: TokenTree, ids: Sequence[int]) -> TreeVerdict:
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        target_token = ids[1 + node]
        child = next((child for child in tree.children.get(node, ()) if tree.tokens[child] == target_token), None)
        if child is None:
            return TreeVerdict(tuple(path), target_token)
        path.append(child)
