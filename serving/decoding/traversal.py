"""Verification of drawn trees from their leaves to the root (traversal verification, Weng et al. 2025), exact.

A path X₁ … Xᵢ has the weights w₀ = 1, wᵢ = min(1, wᵢ₋₁ · p(Xᵢ) / q(Xᵢ)), as in block verification, which this is for
chains. The first path of the tree is tried as a whole, with its last weight. A node that is rejected is taken out: its
parent's p becomes norm(max(0, w · p − q)), its weight m / (m + 1 − w) with m = Σ max(0, w · p − q), and q loses the
node's token. Then the parent's next child is tried, or the parent itself where it has none left.

The readable form. On CPUs engines run it in C++ (`decoding.kernel_verdicts`). What it gains: `benchmarks/traversal.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.verification import after_rejection, group_probs, without


class Stop(NamedTuple):
    """A place where the accepted path may end.

    chance: probability that it ends here, if it ended at none of the places before.
    law: `[V]` float64, of the token that follows.
    """

    node: int  # −1 for the text
    chance: float
    law: Tensor


def traversal(target_probs: Tensor, tree: TokenTree) -> Iterator[Stop]:
    """Yield where the accepted path may end, in the order in which it is tried. The last one is the text, with 1.

    Args:
        target_probs: `[1 + n, V]` under the request's policy: row 0 follows the text, row 1 + i node i.
        tree: n nodes.
    """
    yield from _below(target_probs.double(), tree, ROOT, 1.0)


def expected_tokens(target_probs: Tensor, tree: TokenTree) -> float:
    """Return the expected number of accepted tokens. For the arguments see `traversal`."""
    expected, reached = 0.0, 1.0
    for node, chance, _ in traversal(target_probs, tree):
        expected += reached * chance * (0 if node == ROOT else tree.depths[node])
        reached *= 1 - chance
    return expected


def expected_by_level(target_probs: Tensor, tree: TokenTree, node: int = ROOT) -> float:
    """Return the expected number of tokens behind a node that `verify_tree` accepts.

    For the arguments see `traversal`.
    """
    p, reached, expected = target_probs[1 + node].double(), 1.0, 0.0
    for group in tree.groups_at(node):
        q = group_probs(group, p)
        for child in group.nodes:
            token = tree.tokens[child]
            drafted = float(q[token]) if q is not None else 1.0
            chance = min(1.0, float(p[token]) / drafted) if drafted > 0 else 0.0
            if chance > 0:
                expected += reached * chance * (1 + expected_by_level(target_probs, tree, child))
            reached *= 1 - chance
            p, q = after_rejection(p, q, token)
    return expected


def _below(probs: Tensor, tree: TokenTree, node: int, weight: float) -> Iterator[Stop]:
    """Yield the places below a node, and the node itself."""
    p = probs[1 + node]
    for group in tree.groups_at(node):
        q = group_probs(group, p)
        for child in group.nodes:
            token = tree.tokens[child]
            drafted = float(q[token]) if q is not None else 1.0
            own = min(1.0, weight * float(p[token]) / drafted) if drafted > 0 else 0.0
            yield from _below(probs, tree, child, own)
            law = torch.zeros_like(p).index_fill_(0, torch.tensor(token), 1.0) if q is None else q
            rest = (weight * p - law).clamp(min=0)
            mass = float(rest.sum())
            # Where rounding leaves nothing, w · p = q up to rounding.
            p, weight = (rest / mass, mass / (mass + (1 - weight))) if mass > 0 else (p, float(weight == 1))
            q = without(q, token)
    yield Stop(node, 1.0 if node == ROOT else weight, p)
