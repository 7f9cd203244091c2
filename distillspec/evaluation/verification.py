"""Exact verification of a drafted chain, as pure functions (Leviathan et al. 2023, Chen et al. 2023).

The reference decoder's verifier. It shares the formulas of `rejection_sampling` with the engine and nothing else, on
purpose: the engine's batched verifiers are tested against the reference decoder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.rejection_sampling import accepts, residual_probs
from distillspec.sampling import draw


class ChainVerdict(NamedTuple):
    """Number of accepted proposals and the token that follows them, `[...]` int64 each."""

    accepted: Tensor
    next_token: Tensor


def verify_chain(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
) -> ChainVerdict:
    """Accept x with probability min(1, p(x) / q(x)). At the first rejection draw from norm(max(0, p − q)).

    When all k are accepted, the next token (the bonus) is drawn from p. The result is distributed exactly as k + 1
    tokens, or as many as there are, drawn from the target. k may be 0.

    Args:
        target_probs: `[..., k + 1, V]`, under the request's policy. Row i follows the first i proposals.
        draft_probs: `[..., k, V]`, the distribution of proposal i, zero for ids a truncated draft lacks.
        draft_tokens: `[..., k]` int64, absolute ids.
        accept_uniforms: `[..., k]` in [0, 1), one a proposal.
        next_uniforms: `[...]` in [0, 1), independent of everything that the proposals depended on.
    """
    proposals = draft_tokens.shape[-1]
    ids = draft_tokens.unsqueeze(-1)
    p = target_probs[..., :proposals, :].gather(-1, ids).squeeze(-1)
    q = draft_probs.gather(-1, ids).squeeze(-1)
    accepted = accepts(p, q, accept_uniforms).long().cumprod(-1).sum(-1)
    return ChainVerdict(accepted, draw(next_probs(target_probs, draft_probs, accepted), next_uniforms))


def next_probs(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor) -> Tensor:
    """Return unnormalised `[..., V]`: max(0, p − q) at the first rejection, p if all proposals were accepted."""
    p = row_of(target_probs, accepted)
    # After the last proposal nothing was drafted: q = 0 there, and the residual is p itself.
    no_proposal = draft_probs.new_zeros(*draft_probs.shape[:-2], 1, draft_probs.shape[-1])
    q = row_of(torch.cat([draft_probs, no_proposal], dim=-2), accepted)
    return residual_probs(p, q)


def verify_greedy(target_choices: Tensor, draft_tokens: Tensor) -> ChainVerdict:
    """Verify at temperature 0: proposals are accepted while they equal the target's argmax.

    Args:
        target_choices: `[..., k + 1]` int64.
        draft_tokens: `[..., k]` int64.
    """
    proposals = draft_tokens.shape[-1]
    accepted = (target_choices[..., :proposals] == draft_tokens).long().cumprod(-1).sum(-1)
    return ChainVerdict(accepted, target_choices.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def row_of(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows [..., n, V]` at `index [...]`, `[..., V]`."""
    gathered = index[..., None, None].expand(*index.shape, 1, rows.shape[-1])
    return rows.gather(-2, gathered).squeeze(-2)
