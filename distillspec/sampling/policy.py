"""Probabilities under a sampling policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillspec.sampling.checks import check_logits, check_policy
from distillspec.sampling.drawing import best_ids
from distillspec.sampling.nucleus import keep_nucleus
from distillspec.types import SamplingPolicy

# Below this temperature logits are shifted before they are divided.
_COLDEST = 0.01


def policy_probs(logits: Tensor, policy: SamplingPolicy, *, reads_are_free: bool = True) -> Tensor:
    """Return the probabilities `[..., V]` float32 that `policy` draws from, given `logits [..., V]` of any float dtype.

    Greedy gives a one-hot row at the argmax, the lowest id winning ties. Top-k keeps every token tied with the k-th
    (as transformers and vLLM do). Top-p keeps the smallest set whose mass reaches p, lowest ids first among ties.

    Args:
        reads_are_free: False reads nothing from the device and skips the check of the logits.

    Raises:
        NonFiniteLogits: a row holds NaN or +inf, or no finite logit (a ValueError).
        ConfigError: the policy is out of range.
    """
    if policy.is_greedy:
        return _greedy_mask(logits, reads_are_free).float()
    if policy.top_k == 0 and policy.min_p == 0.0 and policy.temperature >= _COLDEST and logits.dtype != torch.float64:
        probs = _warmed(logits, policy, reads_are_free)
        return probs if policy.top_p == 1.0 else _normalised(keep_nucleus(probs, policy.top_p, reads_are_free))
    scaled = _scaled(logits, policy, reads_are_free)
    if policy.top_p == 1.0:
        return torch.softmax(_above_min_p(scaled, policy), -1)
    kept = keep_nucleus(torch.softmax(scaled, -1), policy.top_p, reads_are_free)
    if policy.min_p > 0.0:
        kept.masked_fill_(scaled < math.log(policy.min_p), 0.0)
    return _normalised(kept)


def _warmed(logits: Tensor, policy: SamplingPolicy, reads_are_free: bool) -> Tensor:
    """Return the softmax at the policy's temperature, in as few passes over the vocabulary as possible."""
    check_policy(policy)
    warm = logits.float() if policy.temperature == 1.0 else logits.float() / policy.temperature
    probs = torch.softmax(warm, -1)
    # A row that is no distribution is NaN throughout.
    if reads_are_free and not bool(torch.isfinite(probs[..., 0]).all()):
        check_logits(logits, "sampling")
    return probs


def _scaled(logits: Tensor, policy: SamplingPolicy, reads_are_free: bool) -> Tensor:
    """Return a new tensor of logits under temperature and top-k, with maximum 0."""
    check_policy(policy)
    peaks = logits.amax(-1, keepdim=True)
    if reads_are_free and not bool(torch.isfinite(peaks).all()):
        check_logits(logits, "sampling")
    # Shifting first keeps tiny temperatures from overflowing.
    scaled = (logits - peaks).float() if logits.dtype == torch.float64 else logits.float() - peaks.float()
    if policy.temperature != 1.0:
        scaled /= max(policy.temperature, 1e-30)
    if 0 < policy.top_k < scaled.shape[-1]:
        smallest = scaled.topk(policy.top_k, -1).values[..., -1:]
        scaled.masked_fill_(scaled < smallest, -torch.inf)
    return scaled


def _above_min_p(scaled: Tensor, policy: SamplingPolicy) -> Tensor:
    """Apply min-p in place, relative to the most probable token, whose logit is 0."""
    if policy.min_p > 0.0:
        scaled.masked_fill_(scaled < math.log(policy.min_p), -torch.inf)
    return scaled


def _normalised(kept: Tensor) -> Tensor:
    """Return `kept [..., V]` divided by its sums. Works in place if no gradient passes."""
    sums = kept.sum(-1, keepdim=True)
    return kept / sums if kept.requires_grad else kept.div_(sums)


def _greedy_mask(logits: Tensor, reads_are_free: bool) -> Tensor:
    if reads_are_free:
        check_logits(logits, "greedy sampling")
    best = best_ids(logits)[..., None]
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)
