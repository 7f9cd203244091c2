"""The readable verifier, run with real uniforms. `test_tree_rules` holds it to the target's law by enumeration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distillspec.serving.base.tree import DraftProbs, TokenTree
from distillspec.serving.decoding.reference_verification import verify_tree
from distillspec.serving.decoding.verdict import TreeVerdict

V, TRIALS = 8, 4000


def emitted(verify: Callable[[Tensor, TokenTree, Tensor, Tensor], TreeVerdict]) -> tuple[Tensor, Tensor]:
    """Count the first tokens `[V]` after chains of one drafted token, and return p."""
    generator, residual = torch.Generator().manual_seed(11), torch.Generator().manual_seed(12)
    p, q = torch.softmax(1.5 * torch.randn(2, V, generator=generator), -1)
    counts = torch.zeros(V, dtype=torch.float64)
    for _ in range(TRIALS):
        drafted = int(torch.multinomial(q, 1, generator=generator))
        accept = torch.rand(1, generator=generator, dtype=torch.float64)
        own = torch.rand((), generator=residual, dtype=torch.float64)
        verdict = verify(torch.stack([p, p]), TokenTree.chain([drafted], DraftProbs(q[None])), accept, own)
        counts[drafted if verdict.path else verdict.next_token] += 1
    return counts, p


def chi_square_excess(counts: Tensor, p: Tensor) -> float:
    """Return (χ² − df) / √(2 df)."""
    wanted = p.double() * counts.sum()
    degrees = len(wanted) - 1
    return float((((counts - wanted) ** 2 / wanted).sum() - degrees) / (2 * degrees) ** 0.5)


def test_what_comes_out_is_distributed_as_the_target() -> None:
    assert chi_square_excess(*emitted(verify_tree)) < 4


def test_a_residual_that_shares_the_acceptance_stream_is_found_out() -> None:
    def shares(probs: Tensor, tree: TokenTree, accept: Tensor, fresh: Tensor) -> TreeVerdict:
        return verify_tree(probs, tree, accept, accept[-1])

    assert chi_square_excess(*emitted(shares)) > 8
