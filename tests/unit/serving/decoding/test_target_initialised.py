"""Trees that start with the target's own tokens, by enumeration: exact with one of them, and lossy with two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, TARGET, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding.target_initialised import CandidatesRule, verify_from_roots
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.verifier import verify_all_levels, verify_by_level

from .enumeration import drawn
from .test_tree_rules import Pair, V, tables

CPU = torch.device("cpu")


def chosen(
    roots: Sequence[int], below: Sequence[int], accepts: Sequence[bool], p: Pair, q: Pair, reads_are_free: bool
) -> int:
    """Return the root token that becomes text where each one's only child is accepted, or is not if it can be."""
    count, table = len(roots), DraftProbs(q[1].float())
    groups = [SiblingGroup(ROOT, tuple(range(count)), TARGET)]
    groups += [SiblingGroup(node, (count + node,), drawn_from=table, row=root) for node, root in enumerate(roots)]
    tree = TokenTree((*roots, *below), tuple(groups))
    probs = torch.stack([p[0], *(p[1][token] for token in tree.tokens)]).float()
    coins = torch.tensor([0.0] * (1 + count) + [0.0 if own else 1 - 1e-12 for own in accepts], dtype=torch.float64)
    batch, own = TreeBatch([tree], CPU), torch.zeros(count, count, dtype=torch.float64)
    rule = CandidatesRule(batch, lambda at: probs[at], coins, own, reads_are_free)
    verify = verify_by_level if reads_are_free else verify_all_levels
    pending = verify_from_roots(batch, [0], rule, verify)
    return roots[pending.verdicts(pending.numbers.tolist())[0].path[0]]


def law(count: int, p: Pair, q: Pair, reads_are_free: bool) -> Tensor:
    """The law `[V]` of the token that becomes text, among `count` draws of the target with a drafted token each."""
    found = torch.zeros_like(p[0])
    for chance, roots in drawn(count, p[0]):
        for below in product(range(V), repeat=count):
            pairs = list(zip(roots, below, strict=True))
            drafted = prod(float(q[1][pair]) for pair in pairs)
            odds = [min(1.0, float(p[1][pair] / q[1][pair])) for pair in pairs]
            for accepts in product([True, False], repeat=count):
                weight = prod(own if yes else 1 - own for own, yes in zip(odds, accepts, strict=True))
                if weight:
                    found[chosen(roots, below, accepts, p, q, reads_are_free)] += chance * drafted * weight
    return found


@pytest.mark.parametrize("reads_are_free", [True, False])
def test_one_of_the_targets_tokens_is_exact_and_two_are_not(reads_are_free: bool) -> None:
    p, q = tables(0), tables(5)
    for count, lossy in ((1, False), (2, True)):
        found = law(count, p, q, reads_are_free)
        assert float(found.sum()) == pytest.approx(1, abs=1e-6)
        assert (float((found - p[0]).abs().sum() / 2) > 0.004) == lossy
