"""Verification of drafted chains as a whole (block verification, Sun et al. 2024): exact, with longer accepted paths.

Verification token by token rejects at the first token that the draft finds too probable. Here a token's surplus may be
made up for by later ones: a chain X₁ … X_L has the weights w₀ = 1, wᵢ = min(1, wᵢ₋₁ · p(Xᵢ) / q(Xᵢ)), and its first i
tokens are accepted with the probability

    hᵢ = mᵢ / (mᵢ + 1 − wᵢ),  mᵢ = Σₓ max(0, wᵢ · p(x | X₁ … Xᵢ) − q(x | X₁ … Xᵢ)),  h_L = w_L

independently for each i, and the longest accepted part is kept. The next token is drawn from max(0, wᵢ · p − q),
normalised, and from p behind the whole chain (algorithm 2 of the paper). For one token this is the usual rule.

The chain may have ended early for reasons known before its next token was drawn, or at a token that ends the answer.
Its draft could then have gone on with the target's own distribution, which leaves the weights as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from distillspec.sampling import draw_unchecked
from distillspec.serving.base.transfer import to_device
from distillspec.serving.decoding.row_values import Compute
from distillspec.serving.decoding.tree_batch import DrawnRows, TreeBatch
from distillspec.serving.decoding.verdict import TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts


def verify_blocks(
    batch: TreeBatch, members: Sequence[int], probs: Compute, accept_uniforms: Tensor, next_uniforms: Tensor
) -> PendingVerdicts:
    """Verify drawn chains, the trees `members` of a batch, without a device read.

    Args:
        probs: returns p `[m, V]` float32 at rows of logits.
        accept_uniforms: `[N]` float64 in [0, 1), one a row of the batch.
        next_uniforms: `[B]` float64 in [0, 1), for the target's own tokens.
    """
    blocks = Blocks(batch, members, probs)
    taken = blocks.lengths_accepted(accept_uniforms)
    tokens = draw_unchecked(blocks.rest(taken), next_uniforms)

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        return [TreeVerdict(tuple(range(read[i + 1])), read[i]) for i in range(0, len(read), 2)]

    return PendingVerdicts(torch.stack([tokens, taken], 1).flatten(), verdicts)


class Blocks:
    """B chains of at most K tokens. Shorter ones are padded with their last token: `drafted [B, K]` is False there."""

    def __init__(self, batch: TreeBatch, members: Sequence[int], probs: Compute) -> None:
        lengths = [len(batch.trees[member]) for member in members]
        longest = max(lengths)
        chains = [
            range(batch.firsts[m], batch.firsts[m] + 1 + length) for m, length in zip(members, lengths, strict=True)
        ]
        starts = list(accumulate([1 + length for length in lengths[:-1]], initial=0))
        self.batch = batch
        self.p = probs([row for chain in chains for row in chain])
        # A row that defines no distribution gets one, so that what comes before it stands.
        self.p.nan_to_num_(1 / self.p.shape[1])
        places = [[start + min(i, n) for start, n in zip(starts, lengths, strict=True)] for i in range(longest + 1)]
        nodes = [[chain[min(i + 1, n)] for chain, n in zip(chains, lengths, strict=True)] for i in range(longest)]
        uploaded = to_device([*places, *nodes], batch.device)
        self.places = uploaded[: longest + 1].T  # [B, K + 1]: rows of `p`, behind 0 … K tokens
        self.nodes = uploaded[longest + 1 :].T  # [B, K]: rows of the batch, of each token
        self.lengths = to_device(lengths, batch.device)
        self.drafted = torch.arange(longest, device=batch.device) < self.lengths[:, None]
        self.ratios = self._ratios()  # [B, K] float64, p / q of each token
        self.weights = self._weights()  # [B, K + 1] float64

    def chances(self) -> Tensor:
        """Return h₁ … h_K `[B, K]` float64. Beyond a chain's end they mean nothing."""
        inner, weights = self.places[:, 1:-1], self.weights[:, 1:]
        if not inner.shape[1]:
            return weights
        child, weight = self.nodes[:, 1:].flatten(), weights[:, :-1].flatten()
        mass = torch.zeros_like(weight)
        for drawn in self.batch.drawn:
            surplus = _surplus(self.p, inner.flatten(), weight, drawn, child)
            mass = torch.where(drawn.rows[child] >= 0, surplus, mass)
        total = mass + (1 - weight)
        chance = torch.where(total > 0, mass / total.clamp(min=torch.finfo(total.dtype).tiny), 1.0)
        chances = torch.cat([chance.view_as(inner), weights[:, -1:]], 1)
        ends = torch.arange(1, 1 + chances.shape[1], device=chances.device) == self.lengths[:, None]
        return torch.where(ends, weights, chances)

    def lengths_accepted(self, accept_uniforms: Tensor) -> Tensor:
        """Return how many tokens of each chain are accepted `[B]`."""
        accepted = (accept_uniforms[self.nodes] < self.chances()) & self.drafted
        counts = torch.arange(1, self.nodes.shape[1] + 1, device=accept_uniforms.device)
        return (accepted * counts).amax(1)

    def rest(self, taken: Tensor) -> Tensor:
        """Return what the token behind the first `taken [B]` tokens is drawn from `[B, V]`, not normalised."""
        p = self.p.index_select(0, self._at(self.places, taken))
        weight = self._at(self.weights, taken)
        behind = taken == self.lengths
        child = self._at(self.nodes, taken.clamp(max=self.nodes.shape[1] - 1))
        rest = p * torch.where(behind, 1.0, weight).float()[:, None]
        for drawn in self.batch.drawn:
            q = drawn.probs_of(child, None).masked_fill_(behind[:, None], 0.0)
            if drawn.kept_ids is None:
                rest -= q
            else:
                rest.index_add_(1, drawn.kept_ids, q, alpha=-1)
        rest.clamp_(min=0)
        # Where rounding leaves nothing, w · p = q up to rounding.
        return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)

    def _ratios(self) -> Tensor:
        tokens = self.batch.tokens[self.nodes].contiguous()
        p = self.p[self.places[:, :-1], tokens].double()
        q = torch.zeros_like(p)
        for drawn in self.batch.drawn:
            from_table = drawn.rows[self.nodes] >= 0
            q = torch.where(from_table, drawn.probs_at(self.nodes, tokens).double(), q)
        return torch.where(self.drafted, p / q.clamp(min=torch.finfo(torch.float32).tiny), 1.0)

    def _weights(self) -> Tensor:
        weights = [torch.ones_like(self.ratios[:, 0])]
        for ratio in self.ratios.unbind(1):
            weights.append((weights[-1] * ratio).clamp(max=1.0))
        return torch.stack(weights, 1)

    @staticmethod
    def _at(table: Tensor, column: Tensor) -> Tensor:
        return table.gather(1, column[:, None])[:, 0]


def _surplus(p: Tensor, rows: Tensor, weight: Tensor, drawn: DrawnRows, child: Tensor) -> Tensor:
    """Return Σₓ max(0, w · p(x) − q(x)) `[m]` float64.

    Args:
        p: `[R, V]`, each row normalised.
        rows: `[m]`, rows of p.
        weight: `[m]`, w.
        child: `[m]`, nodes that were drawn from q.
    """
    known = (p if drawn.kept_ids is None else p.index_select(1, drawn.kept_ids)).index_select(0, rows)
    scaled = known * weight.float()[:, None]
    above = scaled.sub_(drawn.probs_of(child, None)).clamp_(min=0).sum(1).double()
    if drawn.kept_ids is None:
        return above
    return above + weight * (1 - known.sum(1).double()).clamp_(min=0)
