"""Rewards of drafts: tokens and seconds, summed before they are divided."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from distillspec.serving.base.plans import StepResult, decoding_rows
from distillspec.serving.selection.base import Choices

Key = tuple[Hashable, str]  # what is told apart, and the draft
ALL = "all"  # what is told apart where all rows are summed


class Rewards:
    """Σ tokens / Σ seconds of drafts. A mean of steps' ratios would count short steps as much as long ones."""

    def __init__(self) -> None:
        self._sums: dict[Key, list[float]] = {}  # tokens, seconds

    def add(self, key: Key, tokens: float, seconds: float) -> None:
        """Count a step of one row."""
        own = self._sums.setdefault(key, [0.0, 0.0])
        own[0] += tokens
        own[1] += seconds

    def rate(self, key: Key) -> float | None:
        """Return the tokens a second of a key, None if nothing is known of it."""
        tokens, seconds = self._sums.get(key, (0.0, 0.0))
        return tokens / seconds if seconds > 0 else None

    def keep_only(self, first: Iterable[Hashable]) -> None:
        """Drop keys that begin with none of these."""
        alive = set(first)
        self._sums = {key: own for key, own in self._sums.items() if key[0] in alive}

    def forget(self, source: str) -> None:
        """Drop all that is known of a draft."""
        self._sums = {key: own for key, own in self._sums.items() if key[1] != source}


def row_rewards(result: StepResult, chosen: Choices) -> list[tuple[str, str, float, float]]:
    """Return row, draft, tokens and seconds of each row of a step that a draft was chosen for.

    The seconds are the target's pass and the passes of that draft: those of others are not its doing.
    """
    found = []
    for row in decoding_rows(result):
        if (source := chosen.get(row.sequence_id)) is not None:
            drafted_s = result.drafted_s.get(source, 0.0) if result.drafted_s else result.draft_s
            found.append((row.sequence_id, source, float(row.emitted), result.target_s + drafted_s))
    return found
