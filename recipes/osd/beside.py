"""Acceptance at a row's first position where a store names a token that is tried before the draft's.

The named token s is accepted with p(s). Else the draft's token is judged against p without s:
α = p(s) + Σ_{y ≠ s} min(p(y), (1 − p(s)) q(y)) (multi-round rejection, SpecInfer, Miao et al. 2023). Both tokens are
verified in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distillspec.evaluation.positions import CHUNK_POSITIONS, probs_of
from distillspec.evaluation.states import TargetStates, drafted_hidden
from distillspec.losses import BucketedPair
from distillspec.models import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.signals import TeacherSignal

NOTHING = -1  # in place of a named token


def bounds_beside(pair: BucketedPair, signal: TeacherSignal, named: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most and the least α, `[N]` each, that the log's signal allows.

    Args:
        pair: target and draft over the signal's top tokens and their tail. It lacks what the draft does not keep.
        signal: of N positions.
        named: `[N]`, `NOTHING` where no token is named.
    """
    target, draft = pair.target_probs, pair.draft_probs
    top = signal.logprobs.float().exp()
    is_named = signal.ids.long() == named[:, None]
    chance = (top * is_named).sum(-1)
    overlap = torch.minimum(target, (1 - chance)[:, None] * draft)
    overlap[:, :-1] *= ~is_named
    lower = chance + overlap[:, :-1].sum(-1)
    # A named token of the tail is at most as probable as the least of the top tokens.
    in_tail = (named != NOTHING) & ~is_named.any(-1)
    room = torch.where(in_tail, torch.minimum(signal.tail, top[:, -1]), 0)
    return (lower + overlap[:, -1] + room).clamp(max=1), lower


@torch.no_grad()
def alpha_beside(
    draft: LanguageModel, target: LanguageModel, answer: LoggedAnswer, named: Tensor, states: TargetStates
) -> Tensor:
    """Return α `[R]` float64 by whole distributions. `named` is `[R]`, as above."""
    sample = answer.sample()
    draft_hidden = drafted_hidden(draft, sample, states, 1)[0]
    target_hidden = states.hidden(sample)
    pieces = []
    for start in range(0, len(named), CHUNK_POSITIONS):
        rows = slice(start, start + CHUNK_POSITIONS)
        p = policy_probs(target.head.logits(target_hidden[rows]), answer.policy)
        q = policy_probs(draft.head.logits(draft_hidden[rows]), answer.policy)
        pieces.append(_whole(p, q, draft.kept_ids, named[rows, None].to(p.device)).double().cpu())
    return torch.cat(pieces)


def _whole(p: Tensor, q: Tensor, kept_ids: Tensor | None, named: Tensor) -> Tensor:
    """Return α `[C]` of p `[C, V]`, q `[C, width]` and named tokens `[C, 1]`."""
    ids = named.clamp(min=0)
    chance, draft_chance = (
        torch.where(named == NOTHING, 0, probs) for probs in (p.gather(-1, ids), probs_of(ids, q, kept_ids))
    )
    kept = p if kept_ids is None else p[:, kept_ids]
    overlap = torch.minimum(kept, (1 - chance) * q).sum(-1, keepdim=True)
    of_named = torch.minimum(chance, (1 - chance) * draft_chance)  # p(s) is 0 where nothing is named
    return (chance + overlap - of_named)[:, 0]
