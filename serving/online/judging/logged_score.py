"""A draft's score on a logged answer, by what the log holds of the target: no pass of the target.

The answer is the target's own text x ~ p, whichever draft served it. So w = min(1, q(x) / p(x)) estimates Σ min(p, q)
without bias, and its products along the text estimate survival. With the logged K best tokens

    Σ_{K best} min(p, q) + [x is none of them] · w

is unbiased too, with less variance. p and q are those of the answer's policy: the log's raw log-probabilities, softened
by its temperature (`policy_log_z` normalises them), then filtered among the K best. A position that the log does not
decide (a filter reaches beyond the K best, or there are no `policy_logprobs`) counts for nothing: nothing is accepted
there, by any draft. Which positions these are depends on p alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.evaluation.positions import Positions, measure_positions, probs_of
from distillspec.evaluation.states import TargetStates, drafted_hidden
from distillspec.models import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.types import SamplingPolicy


def target_score(draft: LanguageModel, answer: LoggedAnswer, states: TargetStates, speculation_length: int) -> Score:
    """Return what `logged_score` estimates, by whole distributions: the target reads the answer again."""
    positions = measure_positions(
        draft, states.target, answer.sample(), answer.policy, states=states, speculation_length=speculation_length
    )
    return Score.of(positions, answer.finished, speculation_length, len(positions))


def nothing_accepted(answer: LoggedAnswer, speculation_length: int) -> Score:
    """Return the score of a draft of which no token of an answer is accepted."""
    none = torch.zeros(len(answer.response_ids), dtype=torch.float64)
    return Score.of(Positions(none, none, none, none, none, none), answer.finished, speculation_length, len(none))


class LoggedTarget(NamedTuple):
    """The target at R tokens, as the log has it, under the answer's policy."""

    ids: Tensor  # [R, K] int64, most probable first, −1 for none
    probs: Tensor  # [R, K] float32 p, 0 outside the filters
    of_label: Tensor  # [R] float32 p(x)
    inside: Tensor  # [R] bool: x is among the K best
    known: Tensor  # [R] bool: p is decided


@torch.no_grad()
def logged_score(
    draft: LanguageModel, answer: LoggedAnswer, states: TargetStates | None, speculation_length: int
) -> Score:
    """Return the score for speculation lengths up to `speculation_length`.

    Args:
        states: of the target, for drafts that read its states.

    Raises:
        NonFiniteLogits: the draft's logits at some position define no distribution.
    """
    target, labels = logged_target(answer), torch.tensor(answer.response_ids)
    hidden = drafted_hidden(draft, answer.sample(), states, speculation_length)
    by_position = [_positions(draft, target, each, labels, answer.policy) for each in hidden]
    if draft.state_input is not None:  # a draft accepts nothing at positions that it cannot draft
        none = torch.zeros(len(labels), dtype=torch.float64)
        by_position += [Positions(none, none, none, none, none, none)] * (speculation_length - len(by_position))
    positions = replace(by_position[0], deeper=tuple(by_position[1:]))
    return Score.of(positions, answer.finished, speculation_length, int(target.known.sum()))


def logged_target(answer: LoggedAnswer) -> LoggedTarget:
    """Return the target's probabilities under the answer's policy, as far as the log decides them."""
    policy, labels = answer.policy, torch.tensor(answer.response_ids)
    ids, logprobs = answer.signal.ids.long(), answer.policy_logprobs.float()
    inside = ids == labels[:, None]
    if policy.is_greedy:
        return LoggedTarget(ids, inside.float(), torch.ones(len(labels)), inside.any(-1), logprobs.isfinite())
    softened = (answer.signal.logprobs.float() / policy.temperature - answer.policy_log_z.float()[:, None]).exp()
    probs, mass, decided = _filtered(softened, inside, policy)
    of_label = (logprobs.exp() / mass).clamp(max=1)
    return LoggedTarget(ids, probs, of_label, inside.any(-1), decided & logprobs.isfinite())


def _filtered(probs: Tensor, inside: Tensor, policy: SamplingPolicy) -> tuple[Tensor, Tensor, Tensor]:
    """Apply top-k, top-p and min-p to the K best. The emitted token passed, so rounding does not drop it.

    Args:
        probs: `[R, K]` before the filters, in descending order.
        inside: `[R, K]` True at the emitted token.

    Returns:
        Probabilities `[R, K]`, the mass that they were divided by `[R]`, and where these are known `[R]` bool.
    """
    every = torch.ones(len(probs), dtype=torch.bool)
    if policy.is_plain:
        return probs, every.float(), every
    kept, decided, count = torch.ones_like(inside), every, probs.shape[1]
    if policy.top_k > 0:
        kept = kept & (torch.arange(count) < policy.top_k)
        decided = decided & (policy.top_k <= count)
    if policy.top_p < 1:
        within = torch.where(kept, probs, 0.0)
        wanted = policy.top_p * (within.sum(-1) if policy.top_k > 0 else every.float())
        kept = kept & (within.cumsum(-1) - within < wanted[:, None])
        decided = decided & (within.sum(-1) >= wanted)
    if policy.min_p > 0:
        kept = kept & (probs >= policy.min_p * probs[:, :1])
    if policy.top_k == 0 and policy.top_p >= 1:  # min-p alone may reach beyond the K best
        decided = decided & ~kept[:, -1]
    probs = torch.where(kept | inside, probs, 0.0)
    mass = probs.sum(-1)
    return probs / mass[:, None], mass, decided & inside.any(-1)


def _positions(
    draft: LanguageModel, target: LoggedTarget, hidden: Tensor, labels: Tensor, policy: SamplingPolicy
) -> Positions:
    logits = draft.head.logits(hidden).cpu()
    q = policy_probs(logits, policy)
    kept_ids = None if draft.kept_ids is None else draft.kept_ids.cpu()
    stop_ids = torch.tensor(draft.stop_ids, dtype=torch.int64)
    q_best = torch.where(target.ids >= 0, probs_of(target.ids.clamp(min=0), q, kept_ids), 0.0)
    q_label = probs_of(labels[:, None], q, kept_ids)[:, 0]
    accepted = torch.where(target.of_label > 0, (q_label / target.of_label).clamp(max=1), 0.0)
    outside = torch.where(target.inside, 0.0, accepted)
    overlap = torch.minimum(target.probs, q_best)
    going_on = torch.where(torch.isin(target.ids, stop_ids), 0.0, overlap).sum(-1)
    on_choice = target.ids == draft.absolute_ids(logits.argmax(-1))[:, None]
    covered = target.probs if kept_ids is None else target.probs * torch.isin(target.ids, kept_ids)

    def known(column: Tensor) -> Tensor:
        return torch.where(target.known, column, 0.0).double()

    return Positions(
        alpha=known(overlap.sum(-1) + outside),
        continuing=known(going_on + torch.where(torch.isin(labels, stop_ids), 0.0, outside)),
        agreement=known(on_choice[:, 0].float()),
        p_of_draft_argmax=known(torch.where(on_choice, target.probs, 0.0).sum(-1)),
        ceiling=known(covered.sum(-1)),
        accepted=known(accepted),
    )
