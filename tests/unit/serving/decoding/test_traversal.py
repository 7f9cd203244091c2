"""Traversal verification: the target's law by enumeration, no fewer tokens than by level, blocks for chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding import traversal as module
from distillspec.serving.decoding.reference_verification import group_probs
from distillspec.serving.decoding.traversal import (
    after_leaf,
    child_weight,
    expected_by_level,
    expected_tokens,
    traversal,
)

from .enumeration import Process, fixed, law, sampled, side_by_side, traversed
from .test_block_verification import blocks_of, random_law

V = 4
KEPT = torch.tensor([0, 2, 3])
TRUTH = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)


def random_probs(seed: int, width: int = V, rows: int = 1 + V) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(1.5 * torch.randn(rows, width, generator=generator).double(), -1)


def ways(q: Tensor, kept: Tensor) -> dict[str, Callable[[], Process]]:
    greedy = TokenTree.of_parents([1, 3, 0], [ROOT, ROOT, 0])
    one_of_kept = torch.softmax(torch.log(q[[0, *(1 + kept).tolist()]][:, kept]), -1)
    return {
        "chain": lambda: sampled((1, 1), q[0], q[1:]),
        "siblings": lambda: sampled((3, 0), q[0], q[1:]),
        "tree": lambda: sampled((2, 2), q[0], q[1:]),
        "truncated": lambda: sampled((2, 1), one_of_kept[0], one_of_kept[1:], kept),
        "one-hot": lambda: fixed(greedy),
        "two sources": lambda: side_by_side(sampled((2, 0), q[0], q[1:]), sampled((1, 0), q[1], q[1:])),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ways(random_probs(0), KEPT))
def test_what_is_emitted_has_the_targets_law(way: str, seed: int) -> None:
    p, q = random_probs(seed), random_probs(10 + seed)
    if seed == 3:  # ties, zeros and a draft that is the target
        p, q = TRUTH.expand(5, V), torch.cat([TRUTH[None], random_probs(3, rows=4)])
    found = traversed(ways(q, KEPT)[way](), p)
    assert torch.allclose(found, p[0][:, None] * p[1:], atol=1e-6)


def _leaves_the_child_in_q(q: Tensor | None, token: int) -> Tensor | None:
    return q


def _does_not_renormalise_q(q: Tensor | None, token: int) -> Tensor | None:
    return None if q is None else q.index_fill(0, torch.tensor(token), 0.0)


def _forgets_the_parents_weight(weight: float, p: Tensor, q: Tensor | None, token: int) -> float:
    return child_weight(1.0, p, q, token)


def _keeps_p(p: Tensor, weight: float, drafted: Tensor) -> tuple[Tensor, float]:
    return p, after_leaf(p, weight, drafted)[1]


def _keeps_the_weight(p: Tensor, weight: float, drafted: Tensor) -> tuple[Tensor, float]:
    return after_leaf(p, weight, drafted)[0], weight


def _subtracts_q_from_all_of_p(p: Tensor, weight: float, drafted: Tensor) -> tuple[Tensor, float]:
    """The residual of a parent that is certain to be accepted."""
    return after_leaf(p, 1.0, drafted)[0], after_leaf(p, weight, drafted)[1]


def _takes_the_first_row(group: SiblingGroup, like: Tensor) -> Tensor | None:
    return group_probs(group._replace(row=0), like)


MUTANTS: list[tuple[str, Callable[..., Any], str]] = [
    ("without", _leaves_the_child_in_q, "tree"),
    ("without", _does_not_renormalise_q, "siblings"),
    ("child_weight", _forgets_the_parents_weight, "chain"),
    ("after_leaf", _keeps_p, "chain"),
    ("after_leaf", _keeps_the_weight, "tree"),
    ("after_leaf", _subtracts_q_from_all_of_p, "chain"),
    ("group_probs", _takes_the_first_row, "chain"),
]


@pytest.mark.parametrize(("name", "mutant", "way"), MUTANTS)
def test_the_enumeration_finds_a_mutant_out(
    name: str, mutant: Callable[..., Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = random_probs(1), random_probs(11)
    monkeypatch.setattr(module, name, mutant)
    found = traversed(ways(q, KEPT)[way](), p)
    assert float((found - p[0][:, None] * p[1:]).abs().sum() / 2) > 0.004


@pytest.mark.parametrize("seed", range(5))
def test_chains_are_judged_as_blocks(seed: int) -> None:
    p, q = random_law(seed), random_law(seed + 50)
    tokens = (0, 2, 1)
    blocks = blocks_of(tokens, p, q, None)
    probs = torch.stack([p(tokens[:i]) for i in range(4)])
    chain = TokenTree.chain(tokens, DraftProbs(torch.stack([q(tokens[:i]) for i in range(3)]).float()))
    stops = list(traversal(probs, chain))
    assert [stop.node for stop in stops] == [2, 1, 0, ROOT]
    assert [stop.chance for stop in stops[:3]] == pytest.approx(blocks.chances()[0].flip(0).tolist(), abs=1e-6)
    assert stops[-1].chance == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_fewer_tokens_than_level_by_level_are_expected(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all trees that could be drawn. Of one token, both are the same."""
    p, q = random_probs(seed), random_probs(20 + seed)

    def both(widths: tuple[int, int]) -> tuple[float, float]:
        whole, levels = 0.0, 0.0
        for probability, tree in sampled(widths, q[0], q[1:]):
            probs = torch.stack([p[0], *(p[1 + token] for token in tree.tokens)])
            whole += probability * expected_tokens(probs, tree)
            levels += probability * expected_by_level(probs, tree)
        return whole, levels

    whole, levels = both((2, 2))
    assert whole > levels - 1e-9
    whole, levels = both((3, 0))
    assert whole == pytest.approx(levels, abs=1e-6)
    assert float(law(sampled((2, 1), q[0], q[1:]), p[0], p[1:], "oracle", monkeypatch).sum()) == pytest.approx(1)


def test_a_group_of_no_nodes_changes_nothing() -> None:
    tree = TokenTree((), (SiblingGroup(ROOT, ()),))
    (stop,) = traversal(torch.full((1, V), 1 / V), tree)
    assert (stop.node, stop.chance) == (ROOT, 1.0)
