"""Rewards of drafts: tokens and seconds, summed before they are divided."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple

from distillspec.serving.base.plans import StepResult, decoding_rows
from distillspec.serving.selection.base import Choices

Key = tuple[Hashable, str]  # the kind that is summed by itself, and the draft
ALL = "all"  # the kind where all rows are summed


class Reward(NamedTuple):
    """Tokens that a draft brought one row in a step, and what they took."""

    row: str
    source: str
    tokens: float
    seconds: float  # of the target's pass and of the draft's own passes, not of other drafts'
    nodes: int  # drafted tokens that the target verified


class Rewards:
    """Σ tokens / Σ seconds of drafts. A mean of steps' ratios would count short steps as much as long ones."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, dict[str, list[float]]] = {}  # by draft: tokens, seconds

    def add(self, key: Key, tokens: float, seconds: float) -> None:
        """Count a step of one row."""
        first, source = key
        sums = self._sums.setdefault(first, {}).setdefault(source, [0.0, 0.0])
        sums[0] += tokens
        sums[1] += seconds

    def rate(self, key: Key) -> float | None:
        """Return the tokens a second of a key, None if nothing is known of it."""
        first, source = key
        return self.rates(first).get(source)

    def rates(self, first: Hashable) -> dict[str, float]:
        """Return the tokens a second of all drafts that something is known of."""
        sums = self._sums.get(first, {})
        return {source: tokens / seconds for source, (tokens, seconds) in sums.items() if seconds > 0}

    def keep_only(self, first: Iterable[Hashable]) -> None:
        """Drop keys that begin with none of these."""
        alive = set(first)
        self._sums = {name: by_draft for name, by_draft in self._sums.items() if name in alive}

    def forget(self, source: str) -> None:
        """Drop all that is known of a draft."""
        for by_draft in self._sums.values():
            by_draft.pop(source, None)


def row_rewards(result: StepResult, chosen: Choices) -> list[Reward]:
    """Return the reward of each row of a step for which a draft was chosen."""
    sources = {source for source in chosen.values() if source is not None}
    seconds = {source: result.target_s + passes_s(result, [source]) for source in sources}
    return [
        Reward(row.sequence_id, source, float(row.emitted), seconds[source], row.nodes)
        for row in decoding_rows(result)
        if (source := chosen.get(row.sequence_id)) is not None
    ]


def passes_s(result: StepResult, sources: Collection[str]) -> float:
    """Return the seconds of these drafts' passes."""
    if not result.drafted_s:
        return result.draft_s if sources else 0.0
    return sum([result.drafted_s.get(source, 0.0) for source in sources])
