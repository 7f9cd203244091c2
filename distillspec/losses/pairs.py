"""Target and draft over the same buckets: the one form in which every divergence is computed.

A bucket is a single token, or all the tokens that a compressed teacher signal lumps together (its tail). Dense logits,
a truncated draft vocabulary and a top-k signal all become a `BucketedPair`, so each loss is one formula. A zero
probability is stored as log(smallest normal float32) ≈ −87.3 instead of −inf. Its exp is negligible (1e-38), while
0·log 0 and its gradient stay finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses.buckets import TINY, bucket_logprobs
from distillspec.sampling import check_logits
from distillspec.signals import TeacherSignal

LOG_TINY = math.log(TINY)
HIDDEN_TAIL = 2.0**-12  # half a unit in the last place of a float16 probability near 1


@dataclass(frozen=True)
class BucketedPair:
    """p (target) and q (draft) over S buckets, natural logarithms, float32 (float64 for float64 logits).

    `target_logp` carries no gradient and sums to 1 − `outside`. The rest is target mass on tokens that the draft cannot
    produce, where its probability is 0. `draft_logp` sums to 1 (with draws from a tail: on average).
    """

    target_logp: Tensor  # [N, S]
    draft_logp: Tensor  # [N, S]
    outside: Tensor  # [N] probability
    truncated: bool = False  # False promises that `outside` is zero
    tail_rate: Tensor | None = None  # [N] with draws from a tail: log q − log p of the whole tail, no gradient

    @cached_property
    def target_probs(self) -> Tensor:
        return self.target_logp.exp()

    @cached_property
    def draft_probs(self) -> Tensor:
        return self.draft_logp.exp()

    def renormalised_target_logp(self) -> Tensor:
        """Return log p given that the token lies inside the draft's vocabulary, `[N, S]`."""
        if not self.truncated:
            return self.target_logp
        return self.target_logp - torch.logsumexp(self.target_logp, -1, keepdim=True)


def widened(logits: Tensor) -> Tensor:
    """Return `logits` as float32, or as float64 if they are (numerical gradient checks)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return `logits` in the dtype of the losses, divided by `temperature` (unchanged for 1)."""
    wide = widened(logits)
    return wide if temperature == 1.0 else wide / temperature


def without_infinities(logp: Tensor) -> Tensor:
    """Return `logp` with −inf replaced by log(tiny), through which no gradient flows."""
    return torch.nan_to_num(logp, nan=math.nan, neginf=LOG_TINY)


def dense_pair(draft_logits: Tensor, target_logits: Tensor, temperature: float, owner: str) -> BucketedPair:
    """Return a pair over the whole vocabulary from checked logits, both `[N, V]`.

    Args:
        owner: the loss that errors name.

    Raises:
        NonFiniteLogits: logits hold NaN or +inf.
        ValueError: the shapes differ.
        ConfigError: the temperature is not above 0 and finite.
    """
    if draft_logits.shape != target_logits.shape:
        raise ValueError(
            f"{owner}: draft logits {tuple(draft_logits.shape)} and target logits "
            f"{tuple(target_logits.shape)} must have one shape; pass kept_ids for a truncated draft "
            "vocabulary, slice padded columns off"
        )
    check_temperature(temperature)
    check_logits(draft_logits, f"{owner}: draft logits")
    check_logits(target_logits, f"{owner}: target logits")
    return full_pair(draft_logits, target_logits, temperature)


def full_pair(draft_logits: Tensor, target_logits: Tensor, temperature: float) -> BucketedPair:
    """Return a pair with one bucket a token, without checks."""
    target_logits = tempered(target_logits.detach(), temperature)
    return BucketedPair(
        target_logp=without_infinities(torch.log_softmax(target_logits, -1)),
        draft_logp=without_infinities(torch.log_softmax(tempered(draft_logits, temperature), -1)),
        outside=torch.zeros(draft_logits.shape[0], device=draft_logits.device),
    )


def truncated_pair(draft_logits: Tensor, target_logits: Tensor, kept_ids: Tensor, temperature: float) -> BucketedPair:
    """Return a pair with one bucket a kept token.

    Args:
        draft_logits: `[N, Vd]`.
        target_logits: `[N, V]`.
        kept_ids: `[Vd]` absolute ids.
    """
    log_z = torch.logsumexp(tempered(target_logits.detach(), temperature), -1, keepdim=True)
    return kept_pair(draft_logits, target_logits.index_select(-1, kept_ids), log_z, temperature)


def kept_pair(draft_logits: Tensor, kept_logits: Tensor, log_z: Tensor, temperature: float = 1.0) -> BucketedPair:
    """Return a pair with one bucket a kept token, from the target's logits of these alone.

    Args:
        draft_logits: `[N, Vd]`.
        kept_logits: `[N, Vd]`.
        log_z: `[N, 1]` log-sum-exp of all the target's logits over the temperature.
    """
    kept_logp = tempered(kept_logits.detach(), temperature) - log_z
    return BucketedPair(
        target_logp=without_infinities(kept_logp),
        draft_logp=without_infinities(torch.log_softmax(tempered(draft_logits, temperature), -1)),
        outside=(1 - kept_logp.exp().sum(-1)).clamp(0, 1),
        truncated=True,
    )


def topk_pair(draft_logits: Tensor, signal: TeacherSignal, kept_ids: Tensor | None) -> BucketedPair:
    """Return K token buckets and one tail bucket from a `topk` signal, at temperature 1.

    The tail compares the target's recorded tail mass with the draft's mass on all its tokens but the top k. A recorded
    id that the draft does not keep counts as outside, and its bucket is empty on both sides. The recorded
    log-probabilities are renormalised, since float16 storage leaves them off by 1e-3. Tokens drawn from the tail have
    buckets of their own in its place (`with_drawn_tail`).
    """
    columns = columns_of(signal.ids, kept_ids, draft_logits.shape[-1])
    known = columns >= 0
    buckets = bucket_logprobs(widened(draft_logits), columns, known)
    tail = rounded_up(widened(signal.tail), buckets[:, -1].detach().exp())
    recorded = torch.cat([widened(signal.logprobs), tail.log().unsqueeze(-1)], -1)
    recorded = recorded - torch.logsumexp(recorded, -1, keepdim=True)
    top_logp = recorded[:, :-1].masked_fill(~known, -torch.inf)
    pair = BucketedPair(
        target_logp=without_infinities(torch.cat([top_logp, recorded[:, -1:]], -1)),
        draft_logp=without_infinities(buckets),
        outside=recorded[:, :-1].exp().masked_fill(known, 0).sum(-1).clamp(0, 1),
        truncated=kept_ids is not None,
    )
    return pair if signal.tail_ids is None else with_drawn_tail(pair, draft_logits, signal, recorded[:, -1], kept_ids)


def rounded_up(tail: Tensor, draft_tail: Tensor) -> Tensor:
    """Return `tail [N]` with each 0 raised to the draft's mass there, at most what float16 may hide.

    The recorded log-probabilities are rounded: a tail of 0 is a small one, not one that rules its tokens out.
    """
    return torch.where(tail > 0, tail, draft_tail.clamp(max=HIDDEN_TAIL))


def with_drawn_tail(
    pair: BucketedPair, draft_logits: Tensor, signal: TeacherSignal, tail_logp: Tensor, kept_ids: Tensor | None
) -> BucketedPair:
    """Return `pair` with a bucket for each of the n tokens drawn from a row's tail, in place of its tail bucket.

    With x ~ p(· | tail) and P the tail's mass, Σ_tail f(p, q) = P · E[f(p(x), q(x)) / p(x)]. For f(p, q) homogeneous of
    degree 1, as of fkl, rkl, jsd, tvd and α, a bucket with target mass P/n and draft mass P/n · q(x)/p(x) is an
    unbiased estimate of that. The draft's masses sum to 1 in expectation only. Rows without draws keep their tail
    bucket. A drawn token that the draft does not keep counts as outside.
    """
    assert signal.tail_ids is not None
    assert signal.tail_logprobs is not None
    logits = widened(draft_logits)
    drawn = signal.tail_ids >= 0
    columns = columns_of(signal.tail_ids, kept_ids, logits.shape[-1])
    known = columns >= 0
    share = (tail_logp.unsqueeze(-1) - drawn.sum(-1, keepdim=True).clamp(min=1).log()).expand_as(drawn)
    draft_logp = logits.gather(-1, columns.clamp(min=0)) - torch.logsumexp(logits, -1, keepdim=True)
    draft_logp = (draft_logp + share - widened(signal.tail_logprobs)).masked_fill(~known, -torch.inf)
    replaced = drawn.any(-1, keepdim=True)

    def joined(buckets: Tensor, draws: Tensor) -> Tensor:
        tail = buckets[:, -1:].masked_fill(replaced, LOG_TINY)
        return torch.cat([buckets[:, :-1], tail, without_infinities(draws)], -1)

    return BucketedPair(
        target_logp=joined(pair.target_logp, share.masked_fill(~known, -torch.inf)),
        draft_logp=joined(pair.draft_logp, draft_logp),
        outside=(pair.outside + (share.exp() * (drawn & ~known)).sum(-1)).clamp(0, 1),
        truncated=pair.truncated,
        tail_rate=torch.where(replaced[:, 0], pair.draft_logp[:, -1].detach() - tail_logp, 0),
    )


def columns_of(ids: Tensor, kept_ids: Tensor | None, width: int) -> Tensor:
    """Return the draft columns (int64, the shape of `ids`) of absolute token ids, −1 where the draft lacks the token.

    Negative ids (padding) are lacking too.

    Raises:
        ValueError: an id lies beyond an untruncated vocabulary.
    """
    ids = ids.long()
    largest = int(ids.max()) if ids.numel() else 0
    if kept_ids is None:
        if largest >= width:
            raise ValueError(
                f"token id {largest} lies outside the draft's {width} columns; "
                "pass kept_ids for a truncated draft vocabulary"
            )
        return ids.clamp(min=-1)
    size = max(largest, int(kept_ids.max())) + 1
    column = torch.full((size,), -1, dtype=torch.int64, device=ids.device)
    column[kept_ids] = torch.arange(kept_ids.numel(), device=ids.device)
    return torch.where(ids >= 0, column[ids.clamp(min=0)], -1)


def check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"loss temperature={temperature} must be finite and > 0")
