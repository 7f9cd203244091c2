"""The C++ kernel on trees of three drafts with vocabularies of their own, beside the readable forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, SiblingGroup, TokenTree, merged
from distillspec.serving.decoding.kernel_verdicts import JudgedTree
from distillspec.serving.decoding.reference_verification import verify_tree
from distillspec.types import SamplingPolicy

from .test_kernel_verdicts import FILTERS, PLAIN, Lot, drawn, random_table, traversed, uniforms

LOT, NODES = 60, 9


def own_tree(vocab: int, kept: Tensor | None, source: str, generator: torch.Generator) -> TokenTree:
    """Two drawn siblings, and one token behind the first of them."""
    table = random_table(vocab, kept, 2, generator, 1.0)
    tokens = [*drawn(table, 0, 2, generator), *drawn(table, 1, 1, generator)]
    groups = (SiblingGroup(ROOT, (0, 1), source, table, 0), SiblingGroup(0, (2,), source, table, 1))
    return TokenTree(tuple(tokens), groups)


def joined_lot(vocab: int, policies: list[SamplingPolicy]) -> Lot:
    generator = torch.Generator().manual_seed(vocab)
    known = {"all": None, "even": torch.arange(0, vocab, 2), "upper": torch.arange(vocab // 3, vocab)}
    trees = [merged([own_tree(vocab, kept, name, generator) for name, kept in known.items()]) for _ in range(LOT)]
    assert all(len(tree) == NODES for tree in trees)
    logits = torch.randn(LOT, 1 + NODES, vocab, generator=generator)
    accept, own = uniforms(LOT * NODES, generator).view(LOT, NODES), uniforms(LOT, generator)
    given = [JudgedTree(tree, (1 + NODES) * i, policies[i % len(policies)]) for i, tree in enumerate(trees)]
    return Lot(given, logits, accept, own)


@pytest.mark.parametrize("vocab", [8, 300])
def test_trees_of_several_drafts_are_judged_as_the_references_judge_them(vocab: int) -> None:
    lot = joined_lot(vocab, [PLAIN, SamplingPolicy(0.5), FILTERS[0], FILTERS[2]])
    if vocab < 100:
        roots = [[tree.tree.tokens[n] for n in tree.tree.children[ROOT]] for tree in lot.trees]
        assert sum(len(own) > len(set(own)) for own in roots) > 20, "drafts propose the same tokens"
    for paths, reference in ((False, verify_tree), (True, traversed)):
        found = lot.judged(paths=paths)
        assert found == lot.by(reference)
        assert {len(verdict.path) for verdict in found} == {0, 1, 2}
