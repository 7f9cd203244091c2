"""Exact verification of a drafted chain, as pure functions (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.sampling import draw


class Verdict(NamedTuple):
    """How many proposals stand, and the token that follows them; `[...]` int64 each."""

    accepted: Tensor
    next_token: Tensor


def verify_block(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
) -> Verdict:
    """Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from norm(max(0, p − q)).

    When all k stand, the next token (the bonus) is drawn from p. What results is distributed exactly as k + 1
    tokens, or as many as there are, drawn from the target. k may be 0.

    Args:
        target_probs: `[..., k + 1, V]`, under the request's policy; row i follows the first i proposals.
        draft_probs: `[..., k, V]`, what proposal i was drawn from; zero for ids a truncated draft lacks.
        draft_tokens: `[..., k]` int64, absolute ids.
        accept_uniforms: `[..., k]` in [0, 1), one a proposal.
        next_uniforms: `[...]` in [0, 1), independent of everything that the proposals depended on.
    """
    proposals = draft_tokens.shape[-1]
    ids = draft_tokens.unsqueeze(-1)
    p = target_probs[..., :proposals, :].gather(-1, ids).squeeze(-1)
    q = draft_probs.gather(-1, ids).squeeze(-1)
    stands = accept_uniforms * q < p
    accepted = stands.long().cumprod(-1).sum(-1)
    return Verdict(accepted, draw(next_probs(target_probs, draft_probs, accepted), next_uniforms))


def next_probs(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor) -> Tensor:
    """Unnormalised `[..., V]`: max(0, p − q) at the first rejection, p where all proposals were accepted."""
    p = _row(target_probs, accepted)
    # After the last proposal nothing was drafted: q = 0 there, and the residual is p itself.
    no_proposal = draft_probs.new_zeros(*draft_probs.shape[:-2], 1, draft_probs.shape[-1])
    q = _row(torch.cat([draft_probs, no_proposal], dim=-2), accepted)
    residual = (p - q).clamp(min=0)
    # p = q up to rounding: then a rejection is rounding too, and p is as good a residual as any.
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)


def verify_greedy(target_choices: Tensor, draft_tokens: Tensor) -> Verdict:
    """The same at temperature 0: proposals stand while they equal the target's argmax.

    `target_choices [..., k + 1]`, `draft_tokens [..., k]`.
    """
    proposals = draft_tokens.shape[-1]
    accepted = (target_choices[..., :proposals] == draft_tokens).long().cumprod(-1).sum(-1)
    return Verdict(accepted, target_choices.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def _row(rows: Tensor, index: Tensor) -> Tensor:
    """`rows [..., n, V]` at `index [...]` → `[..., V]`."""
    places = index[..., None, None].expand(*index.shape, 1, rows.shape[-1])
    return rows.gather(-2, places).squeeze(-2)
