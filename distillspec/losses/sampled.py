"""Losses on single tokens: hard labels, the draft's own samples, and tokens drawn from the target."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses.inputs import LossInputs, PerTokenLoss
from distillspec.losses.pairs import LOG_TINY, columns_of, tempered, widened, without_infinities

MAX_IMPORTANCE = 5.0  # a bound on the variance: text is at most `data.refresh_steps` steps old


@dataclass(frozen=True)
class LabelView:
    """Target and draft at the label of each of N positions. Log-probabilities in nats.

    `target_logp` is that of the label's bucket. It is exact for a live target and for labels inside a recorded top k.
    For other labels it is the whole tail's, an upper bound. `reward` compares buckets, 1{p > q}.
    """

    draft_logp: Tensor  # [N]
    target_logp: Tensor  # [N]
    reward: Tensor  # [N] float32, 0 or 1
    valid: Tensor  # [N] bool: the draft's vocabulary holds the label


def token_logp(draft_logits: Tensor, columns: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log q `[N, M]` at `columns [N, M]`, which must be >= 0. A zero probability gives log(tiny)."""
    logits = tempered(draft_logits, temperature)
    return without_infinities(logits.gather(-1, columns) - torch.logsumexp(logits, -1, keepdim=True))


def label_view(inputs: LossInputs) -> LabelView:
    """Compare both models at the labels. Needs labels, and a live target or a `topk` signal."""
    columns = inputs.label_columns
    valid = columns >= 0
    column = columns.clamp(min=0).unsqueeze(-1)
    bucket = column if inputs.signal is None else _recorded_bucket(inputs.signal.ids, inputs.labels)
    pair = inputs.bucket_pair
    target_logp = pair.target_logp.gather(-1, bucket).squeeze(-1)
    bucket_draft_logp = pair.draft_logp.detach().gather(-1, bucket).squeeze(-1)
    return LabelView(
        draft_logp=token_logp(inputs.draft_logits, column, inputs.temperature).squeeze(-1),
        target_logp=torch.where(valid, target_logp, LOG_TINY),
        reward=(target_logp > bucket_draft_logp).float(),
        valid=valid,
    )


def hard_labels(inputs: LossInputs) -> PerTokenLoss:
    """Return −log q(label) at temperature 1. Labels that the draft's vocabulary lacks are invalid (weight 0)."""
    columns, labels = inputs.label_columns, inputs.labels
    assert labels is not None
    valid = columns >= 0
    values = -token_logp(inputs.draft_logits, columns.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return _masked(values, valid, (~valid & (labels >= 0)).float())


def policy_gradient(inputs: LossInputs) -> PerTokenLoss:
    """Return −w A log q(label) where the draft sampled the label, invalid elsewhere (TVD++, see `tvdpp`).

    The weight w is the label's `importance`: the text was written by an earlier state of the draft.
    """
    if inputs.from_draft is None:
        raise ConfigError("the loss tvdpp needs from_draft: it learns only from tokens that the draft sampled")
    view = label_view(inputs)
    valid = view.valid & inputs.from_draft
    advantage = inputs.advantage if inputs.advantage is not None else advantages(view.reward, valid)
    return _masked(-importance(view, inputs) * advantage.detach() * view.draft_logp, valid, inputs.pair.outside)


def advantages(reward: Tensor, mask: Tensor, mean: float | None = None) -> Tensor:
    """Return (reward − mean) / standard deviation for rewards of 0 and 1, `[N]` float32, 0 outside `mask` (TVD++).

    Rewards that are all equal give advantages of 0: they rank no token above another.

    Args:
        mean: that of the whole batch, of which these N may be a part. None takes it over `mask`.
    """
    if mean is None:
        mean = float(reward[mask].float().mean()) if bool(mask.any()) else 0.0
    centred = torch.where(mask, reward.float() - mean, 0)
    return centred / max(math.sqrt(mean * (1 - mean)), 1e-6)


def importance(view: LabelView, inputs: LossInputs) -> Tensor:
    """Return q(label) now over q(label) when it was drawn, `[N]`, at most `MAX_IMPORTANCE`, without gradient.

    It is 1 where the probability at the draw is unknown, and 0 where that is 0: the token was not drawn from it.
    """
    if inputs.writer_logprobs is None:
        return torch.ones_like(view.draft_logp)
    change = view.draft_logp.detach() - inputs.writer_logprobs
    return torch.nan_to_num(change, nan=0.0, posinf=-torch.inf).exp().clamp(max=MAX_IMPORTANCE)


def target_samples(inputs: LossInputs) -> PerTokenLoss:
    """Return forward KL from M tokens drawn from the target: the mean of −log q(x), the cross-entropy.

    Its gradient is an unbiased estimate of forward KL's. Its value exceeds forward KL by the target's entropy, which
    the samples do not show. Draws that a truncated draft lacks are left out (that renormalises the target) and counted
    in `outside`. A position whose draws are all lacking is invalid.
    """
    assert inputs.signal is not None
    columns = columns_of(inputs.signal.ids, inputs.kept_ids, inputs.draft_logits.shape[-1])
    known = columns >= 0
    surprise = torch.where(known, -token_logp(inputs.draft_logits, columns.clamp(min=0)), 0)
    values = surprise.sum(-1) / known.sum(-1).clamp(min=1)
    return _masked(values, known.any(-1), 1 - known.float().mean(-1))


def sampled_acceptance(inputs: LossInputs) -> Tensor:
    """Return an unbiased estimate of α `[N]` from the target's draws: the mean of min(1, q(x) / p(x)). No gradient."""
    assert inputs.signal is not None
    columns = columns_of(inputs.signal.ids, inputs.kept_ids, inputs.draft_logits.shape[-1])
    draft_logp = token_logp(inputs.draft_logits.detach(), columns.clamp(min=0))
    ratio = (draft_logp - widened(inputs.signal.logprobs)).clamp(max=0).exp()
    return torch.where(columns >= 0, ratio, 0).mean(-1)


def ce(
    draft_logits: Tensor, target_logits: Tensor | None = None, *, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the cross-entropy with hard labels `[N]`, plain fine-tuning. 0 where the label is negative.

    Takes the arguments of the other references, but ignores `target_logits` and `temperature` (a distillation
    temperature).
    """
    inputs = LossInputs(draft_logits, labels=labels)
    inputs.require_finite("ce")
    return hard_labels(inputs).values


def tvdpp(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    labels: Tensor,
    from_draft: Tensor | None = None,
    advantage: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the TVD++ surrogate −A(x)·log q(x) `[N]` on tokens x that the draft sampled, 0 elsewhere.

    The gradient of TVD(p, q) is −E_{x~q}[r(x) ∇ log q(x)] with r(x) = 1{p(x) > q(x)}. A is the reward less its mean,
    over its standard deviation, both over the batch (Goel et al. 2024, "Direct Alignment of Draft Model for Speculative
    Decoding with Chat-Fine-Tuned LLMs"). The value may be negative: only its gradient means something.
    `from_draft=None` takes all labels as sampled from the draft.
    """
    inputs = LossInputs(
        draft_logits,
        target_logits,
        labels=labels,
        from_draft=labels >= 0 if from_draft is None else from_draft,
        advantage=advantage,
        temperature=temperature,
    )
    inputs.require_finite("tvdpp")
    return policy_gradient(inputs).values


def _masked(values: Tensor, valid: Tensor, outside: Tensor) -> PerTokenLoss:
    return PerTokenLoss(torch.where(valid, values, 0), valid, outside)


def _recorded_bucket(ids: Tensor, labels: Tensor | None) -> Tensor:
    """Return the index `[N, 1]` of each label among the recorded `ids [N, K]`, or K, the tail."""
    assert labels is not None
    hit = ids == labels.to(ids.dtype).unsqueeze(-1)
    return torch.where(hit.any(-1), hit.int().argmax(-1), ids.shape[-1]).unsqueeze(-1)
