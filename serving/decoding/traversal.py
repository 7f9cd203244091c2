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
from distillspec.serving.decoding.reference_verification import after_rejection, group_probs, without


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


def child_weight(weight: float, p: Tensor, q: Tensor | None, token: int) -> float:
    """Return the weight of the path that goes on with a child.

    Args:
        weight: of the parent's path.
        p, q: `[V]`, the target's and the draft's law of the child, as far as its elder siblings leave them. q is None
            for a deterministic child.
    """
    drafted = float(q[token]) if q is not None else 1.0
    return min(1.0, weight * float(p[token]) / drafted) if drafted > 0 else 0.0


def after_leaf(p: Tensor, weight: float, drafted: Tensor) -> tuple[Tensor, float]:
    """Return what the p and the weight of a node become where its child, a leaf by then, is rejected.

    Args:
        drafted: `[V]`, the law of that child, q. One-hot for a deterministic one.
    """
    rest = (weight * p - drafted).clamp(min=0)
    mass = float(rest.sum())
    # Where rounding leaves nothing, w · p = q up to rounding.
    return (rest / mass, mass / (mass + (1 - weight))) if mass > 0 else (p, float(weight == 1))


def _below(probs: Tensor, tree: TokenTree, node: int, weight: float) -> Iterator[Stop]:
    """Yield the places below a node, and the node itself."""
    p = probs[1 + node]
    for group in tree.groups_at(node):
        q = group_probs(group, p)
        for child in group.nodes:
            token = tree.tokens[child]
            yield from _below(probs, tree, child, child_weight(weight, p, q, token))
            one_hot = torch.zeros_like(p).index_fill_(0, torch.tensor(token), 1.0)
            p, weight = after_leaf(p, weight, one_hot if q is None else q)
            q = without(q, token)
    yield Stop(node, 1.0 if node == ROOT else weight, p)
