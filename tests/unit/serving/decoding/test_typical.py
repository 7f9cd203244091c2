"""Typical acceptance: its threshold, and what it accepts."""

from __future__ import annotations

import math

import pytest
import torch

from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.typical import SHARE, THRESHOLD, TypicalRule, least_probability
from distillspec.serving.decoding.verifier import Start, Verify, verify_all_levels, verify_by_level

CPU = torch.device("cpu")
P = torch.tensor([0.60, 0.25, 0.10, 0.05])


def test_the_threshold_is_medusas() -> None:
    entropy = -sum(p * math.log(p) for p in P.tolist())
    assert float(least_probability(P[None])) == pytest.approx(min(THRESHOLD, SHARE * math.exp(-entropy)))
    assert float(least_probability(torch.eye(4)[:1])) == pytest.approx(THRESHOLD)
    many = torch.full((1, 1000), 1e-3)
    assert float(least_probability(many)) == pytest.approx(SHARE * 1e-3, rel=1e-5)


def test_the_most_probable_token_is_always_accepted() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.5, 2.0, 20.0):
        probs = torch.softmax(scale * torch.randn(500, 60, generator=generator), -1)
        assert bool((probs.amax(-1) > least_probability(probs)).all())


@pytest.mark.parametrize("verify", [verify_by_level, verify_all_levels])
@pytest.mark.parametrize(
    ("tokens", "path"),
    [
        ([3, 2, 1], (1,)),  # 0.05 is below the threshold of 0.09, 0.10 is not
        ([1, 0], (0,)),  # the first that is probable enough, not the best
        ([3], ()),
    ],
)
def test_the_first_typical_child_is_accepted(tokens: list[int], path: tuple[int, ...], verify: Verify) -> None:
    tree = TokenTree.of_parents(tokens, [ROOT] * len(tokens))
    batch = TreeBatch([tree, TokenTree()], CPU)  # a tree without tokens beside it
    probs = P.expand(batch.rows, -1)
    rule = TypicalRule(batch, lambda at: probs[at], torch.tensor([0.0, 0.999]).double())
    pending = verify(batch, [Start(first, first) for first in batch.firsts], rule)
    first, second = pending.verdicts(pending.numbers.tolist())
    assert first.path == path
    assert (first.next_token, second.next_token) == (0, 3), "drawn from the whole distribution"
    assert second.path == ()
