"""What a step costs: seconds from context and batched tokens (SmartSpec, Liu et al. 2024, Eq. 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from distillspec.errors import ConfigError


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward pass: `per_context · N_context + per_token · N_batched + fixed`, none below 0.

    N_context: tokens that the pass's rows have in the cache, summed; N_batched: tokens it reads, roots counted.
    Raises ConfigError for a coefficient that is negative or not finite.
    """

    per_context: float
    per_token: float
    fixed: float

    def __post_init__(self) -> None:
        for name in ("per_context", "per_token", "fixed"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value} must be finite and at least 0 seconds")

    def seconds(self, context: float, tokens: float) -> float:
        return self.per_context * context + self.per_token * tokens + self.fixed


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of whole steps: one draft pass a depth over the rows that still draft, then one pass of the target.

    Args:
        draft: None where proposals come without a model; they cost `draft_free_s` a step.
    """

    target: ForwardCost
    draft: ForwardCost | None = None
    draft_free_s: float = 5e-4

    def target_s(self, contexts: Seq[int], lengths: Seq[int], prefill_tokens: int = 0) -> float:
        """The target's pass over a root and `lengths[i]` tokens of each row, and over prompt tokens."""
        return self.target.seconds(sum(contexts), sum(lengths) + len(lengths) + prefill_tokens)

    def draft_s(self, contexts: Seq[int], lengths: Seq[int]) -> float:
        """All draft passes: depth s runs over the rows with at least s tokens to draft."""
        deepest = max(lengths, default=0)
        if self.draft is None:
            return self.draft_free_s if deepest else 0.0
        total = 0.0
        for depth in range(1, deepest + 1):
            drafting = [context for context, length in zip(contexts, lengths, strict=True) if length >= depth]
            total += self.draft.seconds(sum(drafting), len(drafting))
        return total

    def step_s(self, contexts: Seq[int], lengths: Seq[int], prefill_tokens: int = 0) -> float:
        """A whole step; raises ValueError where contexts and lengths are not of the same rows."""
        if len(contexts) != len(lengths):
            raise ValueError(f"{len(contexts)} contexts but {len(lengths)} lengths")
        return self.target_s(contexts, lengths, prefill_tokens) + self.draft_s(contexts, lengths)
