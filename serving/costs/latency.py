"""Latency model: seconds of a step from its tokens, rows and context (SmartSpec, Liu et al. 2024, Eq. 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.errors import ConfigError
from distillspec.serving.base.catch_up import catch_up_cost
from distillspec.serving.costs.table import CostTable


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of whole steps: one draft pass a depth over the rows that still draft, then one pass of the target.

    Args:
        target: a pass of the target, over decoding rows and prompt tokens together.
        draft: a pass of the draft. None where proposals come without a model.
        draft_free_s: proposals without a model, a step.

    Raises:
        ConfigError: `draft_free_s` is negative or not finite.
    """

    target: CostTable
    draft: CostTable | None = None
    draft_free_s: float = 5e-4

    def __post_init__(self) -> None:
        if not 0 <= self.draft_free_s < float("inf"):
            raise ConfigError(f"draft_free_s={self.draft_free_s} must be finite and at least 0 seconds")

    def target_s(self, contexts: Sequence[int], lengths: Sequence[int], prefill_tokens: int = 0) -> float:
        """Return the seconds of the target's pass: a root and `lengths[i]` tokens of each row, and prompt tokens."""
        rows = len(lengths)
        return self.target.seconds(sum(contexts), sum(lengths) + rows + prefill_tokens, rows)

    def prompts_s(self, rows: int, prefill_tokens: int) -> float:
        """Return the seconds that prompt tokens add to a pass over `rows` newest tokens."""
        if not prefill_tokens:
            return 0.0
        alone_s = self.target.seconds(0, rows) if rows else 0.0
        return self.target.seconds(0, rows + prefill_tokens) - alone_s

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
        # A row takes part in as many passes as it drafts tokens.
        read = sum([context * length for context, length in zip(contexts, lengths, strict=True)])
        passes_s = sum([self.draft.seconds(0, rows, rows) for rows in rows_by_depth(lengths)])
        return self.draft.per_context * read + passes_s

    def catch_up_s(self, unread_tokens: Sequence[int]) -> float:
        """Return the seconds of catch-up prefill of rows that draft, by their unread tokens."""
        if self.draft is None:
            return 0.0
        (tokens, passes), rows = catch_up_cost(unread_tokens), len(unread_tokens)
        if passes:
            return self.draft.seconds(0, tokens)
        return self.draft.seconds(0, rows + tokens) - self.draft.seconds(0, rows) if tokens else 0.0

    def alike_s(self, rows: int, context: float, length: int) -> float:
        """Return the seconds of a step in which each row drafts `length` tokens. `context` is of all rows together."""
        target_s = self.target.seconds(context, rows * (length + 1), rows)
        if self.draft is None or not length:
            return target_s + self.draft_free_s * (length > 0)
        return target_s + length * self.draft.seconds(context, rows, rows)

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


def rows_by_depth(lengths: Sequence[int]) -> list[int]:
    """Return the rows that still draft at depth 1, 2, … of the deepest."""
    return [sum([length >= depth for length in lengths]) for depth in range(1, max(lengths, default=0) + 1)]


def guessed() -> LatencyModel:
    """Return assumed costs of steps on a machine that was not measured, to be corrected by steps."""
    return LatencyModel(CostTable.line(1e-7, 1e-3, 2e-2), CostTable.line(1e-8, 1e-4, 2e-3))
