"""Latency model: seconds of a step from context and batched tokens (SmartSpec, Liu et al. 2024, Eq. 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy
from numpy.typing import NDArray

from distillspec.errors import ConfigError
from distillspec.serving.base.catch_up import catch_up_cost

ROUNDING = 1e-9  # relative, of sums of seconds
Number = TypeVar("Number", float, NDArray[numpy.float64])


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward pass: `per_context · N_context + per_token · N_batched + fixed`, all at least 0.

    In a mixture of experts also `per_expert` for each expert that is expected to be loaded, over all layers.

    N_context: cached tokens of the pass's rows, summed. N_batched: tokens that the pass reads, roots included. Where
    costs are not that line (products padded to a few sizes), `bumps` are the differences at some N_batched, ascending:
    `((tokens, seconds), …)`, interpolated between.

    Raises:
        ConfigError: a coefficient is negative or not finite, or numbers of experts are impossible.
    """

    per_context: float
    per_token: float
    fixed: float
    per_expert: float = 0.0
    experts: int = 0  # of a layer, 0 for dense models
    active: int = 0  # experts that a token uses
    bumps: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("per_context", "per_token", "fixed", "per_expert"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value} must be finite and at least 0 seconds")
        if not 0 <= self.active <= self.experts or (self.experts > 0 and self.active == 0):
            raise ConfigError(f"active={self.active} must be between 1 and experts={self.experts}")
        if self.per_expert > 0 and self.experts == 0:
            raise ConfigError(f"per_expert={self.per_expert} needs experts and active: how many a layer has and uses")

    def seconds(self, context: float, tokens: float) -> float:
        even = self.per_context * context + self.per_token * tokens + self.fixed
        return even + float(self.uneven_s(tokens)) if self.is_uneven else even

    @property
    def is_uneven(self) -> bool:
        """True if costs are not linear in the tokens."""
        return self.per_expert > 0 or bool(self.bumps)

    def uneven_s(self, tokens: Number) -> Number:
        """Return the part of a pass's seconds that is not linear in its tokens."""
        seconds = self.per_expert * self.loaded_experts(tokens)
        return seconds + self.bump_s(tokens) if self.bumps else seconds

    def bump_s(self, tokens: Number) -> Number:
        """Return the difference from the line in seconds."""
        if not self.bumps:
            return 0.0 * tokens
        known, seconds = zip(*self.bumps, strict=True)
        found: Number = numpy.interp(tokens, known, seconds)
        return found

    def rising(self) -> ForwardCost:
        """The same with bumps raised where more tokens would cost less than fewer.

        Fewer tokens can always be padded to more, so a falling time is noise.
        """
        lifted, most = [], 0.0
        for tokens, bump_s in self.bumps:
            whole_s = self.seconds(0, tokens)
            lifted.append((tokens, bump_s + (most - whole_s if most > whole_s * (1 + ROUNDING) else 0.0)))
            most = max(most, whole_s)
        return replace(self, bumps=tuple(lifted))

    def loaded_experts(self, tokens: Number) -> Number:
        """Experts of a layer expected to be used by any of `tokens`: E · (1 − ((E − a) / E)^tokens)."""
        if not self.experts:
            return 0.0 * tokens
        unused: Number = (1 - self.active / self.experts) ** tokens
        return self.experts * (1 - unused)


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of whole steps: one draft pass a depth over the rows that still draft, then one pass of the target.

    Args:
        target: a pass of the target.
        draft: a pass of the draft. None where proposals come without a model.
        draft_free_s: proposals without a model, a step.
        prefill: the pass over prompt tokens (`per_context` unused). None: they join the target's pass.

    Raises:
        ConfigError: the draft has experts (costs of a row would depend on the others of its depth), or a time is
            negative or not finite.
    """

    target: ForwardCost
    draft: ForwardCost | None = None
    draft_free_s: float = 5e-4
    prefill: ForwardCost | None = None

    def __post_init__(self) -> None:
        if self.draft is not None and self.draft.experts:
            raise ConfigError(f"experts={self.draft.experts} of a draft are not priced; leave them out of its cost")
        if not 0 <= self.draft_free_s < float("inf"):
            raise ConfigError(f"draft_free_s={self.draft_free_s} must be finite and at least 0 seconds")

    def target_s(self, contexts: Sequence[int], lengths: Sequence[int], prefill_tokens: int = 0) -> float:
        """Return the seconds of the target's pass: a root and `lengths[i]` tokens of each row, and prompt tokens."""
        tokens = sum(lengths) + len(lengths)
        if self.prefill is None or not prefill_tokens:
            return self.target.seconds(sum(contexts), tokens + prefill_tokens)
        prompts_s = self.prefill.seconds(0, prefill_tokens)
        return prompts_s + self.target.seconds(sum(contexts), tokens) if tokens else prompts_s

    def draft_s(self, contexts: Sequence[int], lengths: Sequence[int], by_model: Sequence[bool] | None = None) -> float:
        """Return the seconds of all draft passes: depth s runs over the rows with at least s tokens to draft.

        `by_model` is False for rows whose tokens come without the model. All such rows together cost `draft_free_s`.
        """
        if self.draft is None:
            return self.draft_free_s if any(lengths) else 0.0
        if by_model is not None and not all(by_model):
            free = any(length and not own for length, own in zip(lengths, by_model, strict=True))
            lengths = [length if own else 0 for length, own in zip(lengths, by_model, strict=True)]
            return self.draft_s(contexts, lengths) + (self.draft_free_s if free else 0.0)
        deepest = max(lengths, default=0)
        # A row takes part in as many passes as it drafts tokens.
        read = sum([context * length for context, length in zip(contexts, lengths, strict=True)])
        return self.draft.per_context * read + self.draft.per_token * sum(lengths) + self.draft.fixed * deepest

    def catch_up_s(self, unread_tokens: Sequence[int]) -> float:
        """Return the seconds of catch-up prefill of rows that draft, by their unread tokens."""
        if self.draft is None:
            return 0.0
        tokens, passes = catch_up_cost(unread_tokens)
        return self.draft.per_token * tokens + self.draft.fixed * passes

    def alike_s(self, rows: int, context: float, length: int) -> float:
        """Return the seconds of a step in which each row drafts `length` tokens. `context` is of all rows together."""
        target_s = self.target.seconds(context, rows * (length + 1))
        if self.draft is None or not length:
            return target_s + self.draft_free_s * (length > 0)
        return target_s + length * self.draft.seconds(context, rows)

    def step_s(
        self,
        contexts: Sequence[int],
        lengths: Sequence[int],
        prefill_tokens: int = 0,
        by_model: Sequence[bool] | None = None,
    ) -> float:
        """Return the seconds of a whole step. Raise ValueError if numbers of contexts and lengths differ."""
        if len(contexts) != len(lengths):
            raise ValueError(f"{len(contexts)} contexts but {len(lengths)} lengths")
        return self.target_s(contexts, lengths, prefill_tokens) + self.draft_s(contexts, lengths, by_model)


def guessed(experts: tuple[int, int] = (0, 0), padded: Sequence[tuple[int, int]] = ()) -> LatencyModel:
    """Return assumed costs of steps on a machine that was not measured, of the right form, to be corrected by steps.

    Args:
        experts: of a layer of the target, and how many a token uses.
        padded: passes over how many tokens read how many (products padded to a few sizes), ascending.
    """
    per_token, (count, active) = 1e-3, experts
    bumps = tuple([(float(tokens), per_token * (read - tokens)) for tokens, read in padded])
    target = ForwardCost(1e-7, per_token, 2e-2, experts=count, active=active, bumps=bumps)
    return LatencyModel(target, ForwardCost(1e-8, 1e-4, 2e-3))
