"""Typical acceptance (Medusa, Cai et al. 2024, section 3.3.1): lossy, `engine.verification=typical`.

A drafted token is accepted where the target finds it probable enough, whatever the draft's distribution was. Answers
lean towards what the draft proposes. At temperature 0 the rule is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distillspec.sampling import draw_unchecked
from distillspec.serving.decoding.row_values import Values
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.tree_rules import first_child

THRESHOLD = 0.09  # ε: this probability is always enough
SHARE = THRESHOLD**0.5  # δ, of exp(−entropy)


class TypicalRule:
    """Accepts the first child x with p(x) > min(ε, δ·exp(−H(p))). Where none is, the next token is drawn from p.

    The target's most probable token is always accepted, for exp(−H(p)) ≤ max p.

    Args:
        batch: trees of several rows.
        probs: returns p `[m, V]` float32 at rows of logits.
        next_uniforms: `[B]` float64 in [0, 1), for the target's own tokens.
    """

    def __init__(self, batch: TreeBatch, probs: Values, next_uniforms: Tensor) -> None:
        self.batch = batch
        self.values = probs
        self.next_uniforms = next_uniforms

    def accepted(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        children = self.batch.children[at, :widest]
        target_at = values.gather(1, self.batch.tokens[children])
        return first_child(children, target_at > least_probability(values)[:, None])

    def next_tokens(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        return draw_unchecked(values, self.next_uniforms)


def least_probability(probs: Tensor) -> Tensor:
    """Return the probability `[m]` above which tokens are typical of `probs [m, V]`, each row normalised."""
    entropy = torch.special.entr(probs).sum(-1)
    return entropy.neg_().exp_().mul_(SHARE).clamp_(max=THRESHOLD)
