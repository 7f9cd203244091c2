"""Comparison of target and draft at every response position of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distillspec.evaluation.states import TargetStates, drafted_hidden
from distillspec.models.language_model import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.types import Sample, SamplingPolicy

CHUNK_POSITIONS = 128  # rows of a [rows, V] float32 block: 25 MB at V = 49,152
RANKS = 10  # of a head's tokens: a level of a tree has no more


@dataclass(frozen=True)
class Positions:
    """One value a response token, `[R]` float64 each, in the order of the text, of the first drafted position.

    Row 0 is the first drafted position: the one after the last prompt token. p and q are the target's and the
    draft's probabilities under the deployed policy, x the token that the text holds.
    """

    alpha: Tensor  # Σ min(p, q), the acceptance rate (Leviathan et al., Corollary 3.6)
    continuing: Tensor  # the part of alpha on tokens that do not end the response
    agreement: Tensor  # 1 where both models' most probable tokens are the same
    p_of_draft_argmax: Tensor  # p(argmax q): what an engine that drafts greedily accepts
    ceiling: Tensor  # Σ p over the ids the draft keeps: no such draft can have a larger alpha
    accepted: Tensor  # w = min(1, q(x) / p(x)): P(x was an accepted proposal | x was emitted)
    deeper: tuple[Positions, ...] = ()  # the same tokens as second, third, … drafted position, where q differs there
    by_rank: Tensor | None = None  # [R, ranks], of heads: p(the token of rank r in q), by which trees are made

    def at(self, depth: int) -> Positions:
        """Return the values of the tokens as the drafted position `depth`, from 0 on."""
        return self if depth == 0 or not self.deeper else self.deeper[depth - 1]

    def __len__(self) -> int:
        return self.alpha.numel()


@torch.no_grad()
def measure_positions(
    draft: LanguageModel,
    target: LanguageModel,
    sample: Sample,
    policy: SamplingPolicy,
    *,
    chunk_positions: int = CHUNK_POSITIONS,
    states: TargetStates | None = None,
    speculation_length: int = 1,
) -> Positions:
    """Run both models over the sample and compare them at its response positions.

    w is 0 where p(x) = 0: text that the policy cannot have produced (sampled under another one, or written by another
    source) is never emitted, and never accepted.

    Args:
        states: the target's hidden states, so that it need not run again.
        speculation_length: drafted positions to compare. Drafts that read tokens alone have the same q at all of them.

    Raises:
        NonFiniteLogits: a model's logits at some position define no distribution.
    """
    if not sample.response_ids:
        empty = torch.empty(0, dtype=torch.float64)
        return Positions(empty, empty, empty, empty, empty, empty)
    states = states or TargetStates(target)
    drafted = drafted_hidden(draft, sample, states, speculation_length)
    target_hidden = states.hidden(sample)  # behind `features`, which reads them too
    labels = torch.tensor(sample.response_ids, device=target.device)
    stop_columns, ranks = _stop_columns(draft, target.stop_ids), 0 if draft.attends else RANKS
    pieces_by_depth: list[list[tuple[Tensor, ...]]] = [[] for _ in drafted]
    for start in range(0, len(labels), chunk_positions):
        rows = slice(start, start + chunk_positions)
        target_probs = policy_probs(target_logits := target.head.logits(target_hidden[rows]), policy)
        best = target_logits.argmax(-1)
        for pieces, hidden in zip(pieces_by_depth, drafted, strict=True):
            draft_logits = draft.head.logits(hidden[rows])
            pieces.append(_compare(draft, target_probs, best, draft_logits, labels[rows], stop_columns, policy, ranks))
    by_depth = [_joined(pieces) for pieces in pieces_by_depth]
    if draft.state_input is not None:  # a draft accepts nothing at positions that it cannot draft
        none = torch.zeros(len(labels), dtype=torch.float64)
        by_depth += [Positions(none, none, none, none, none, none)] * (speculation_length - len(by_depth))
    return replace(by_depth[0], deeper=tuple(by_depth[1:]))


def _joined(pieces: Sequence[tuple[Tensor, ...]]) -> Positions:
    alpha, continuing, agreement, of_argmax, ceiling, accepted, by_rank = (
        torch.cat(column).double().cpu() for column in zip(*pieces, strict=True)
    )
    ranks = by_rank if by_rank.numel() else None
    return Positions(alpha, continuing, agreement, of_argmax, ceiling, accepted, by_rank=ranks)


def _compare(
    draft: LanguageModel,
    target_probs: Tensor,  # [C, V]
    target_best: Tensor,  # [C]
    draft_logits: Tensor,  # [C, width]
    labels: Tensor,  # [C]
    stop_columns: Tensor,  # [width] bool
    policy: SamplingPolicy,
    ranks: int,
) -> tuple[Tensor, ...]:
    """Return the fields of `Positions` for C positions, `[C]` float32 each, `by_rank` last: `[C, ranks]`."""
    draft_probs = policy_probs(draft_logits, policy)
    kept_ids = None if draft.kept_ids is None else draft.kept_ids.to(target_probs.device)
    kept_probs = target_probs if kept_ids is None else target_probs[:, kept_ids]
    overlap = torch.minimum(kept_probs, draft_probs)
    draft_choice = draft.absolute_ids(draft_logits.argmax(-1))
    p_label = target_probs.gather(-1, labels[:, None]).squeeze(-1)
    q_label = probs_of(labels[:, None], draft_probs, kept_ids)[:, 0]
    return (
        overlap.sum(-1),
        overlap[:, ~stop_columns].sum(-1),
        (draft_choice == target_best).float(),
        target_probs.gather(-1, draft_choice[:, None]).squeeze(-1),
        kept_probs.sum(-1).clamp(max=1) if kept_ids is not None else torch.ones_like(p_label),
        torch.where(p_label > 0, (q_label / p_label).clamp(max=1), 0),
        target_probs.gather(-1, draft.absolute_ids(draft_logits.topk(min(ranks, draft.width)).indices)),
    )


def probs_of(ids: Tensor, draft_probs: Tensor, kept_ids: Tensor | None) -> Tensor:
    """Return q of absolute `ids [C, n]`, given `draft_probs [C, width]`, zero for ids the draft does not keep."""
    if kept_ids is None:
        return draft_probs.gather(-1, ids)
    columns = torch.searchsorted(kept_ids, ids).clamp(max=kept_ids.numel() - 1)
    return torch.where(kept_ids[columns] == ids, draft_probs.gather(-1, columns), 0)


def _stop_columns(draft: LanguageModel, stop_ids: Sequence[int]) -> Tensor:
    """Return bool `[width]`: True for the draft's head columns that end a response."""
    ids = draft.absolute_ids(torch.arange(draft.width, device=draft.device))
    return torch.isin(ids, torch.tensor(list(stop_ids), dtype=ids.dtype, device=ids.device))
