"""Evidence on two drafts: scores of both on the same conversations, and the gain in goodput that they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from distillspec.serving.online.judging.confidence import confidence_sequence
from distillspec.serving.online.judging.score import Score, sum_scores
from distillspec.serving.online.log.records import LogEntry
from distillspec.types import Floats, Interval


@dataclass(frozen=True)
class Costs:
    """Cost of a step at length γ, in plain steps of the target: 1, γ · `verify`, and γ tokens of the draft.

    further: of each drafted token behind the first. None: as much as the first. A block's further tokens cost less.
    """

    draft: float
    verify: float
    further: float | None = None

    def of(self, gamma: int) -> float:
        further = self.draft if self.further is None else self.further
        return self.draft + (gamma - 1) * further + 1 + gamma * self.verify


class Pair(NamedTuple):
    """Scores of both drafts on one conversation."""

    tenant: str
    domain: str
    before: Score
    after: Score


def paired(entries: Sequence[LogEntry], before: Mapping[int, Score], after: Mapping[int, Score]) -> list[Pair]:
    """Return a pair for every conversation with answers that both drafts have a score on."""
    by_conversation: dict[int, list[LogEntry]] = {}
    for entry in entries:
        number = entry.number
        if number in before and number in after and min(before[number].positions, after[number].positions) > 0:
            by_conversation.setdefault(entry.conversation, []).append(entry)
    return [
        Pair(
            conversation[0].tenant,
            conversation[0].domain,
            sum_scores([before[entry.number] for entry in conversation]),
            sum_scores([after[entry.number] for entry in conversation]),
        )
        for conversation in by_conversation.values()
    ]


@dataclass(frozen=True)
class Evidence:
    """Pairs in the order of their conversations, and what steps cost. Each draft runs at its own best length.

    A conversation's lengths are chosen on those before it, as in a server, and the first one runs at length 1. Lengths
    chosen on the conversations that they are judged by would be the luckiest ones, not the best. So a conversation's
    figures never change at later looks, which the interval over all looks needs.

    Length 0 is left out: if neither draft is worth its cost yet, the better one must still be promoted, or no draft
    would ever become worth it.
    """

    pairs: Sequence[Pair]
    costs: Costs

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the best speculation length of both by all pairs: that of the next conversation."""
        before, after = (int(_best_before(*self._by_length(side))[-1]) for side in (0, 1))
        return before, after

    @property
    def goodput(self) -> tuple[float, float]:
        """Return tokens by cost of both. Plain decoding is 1."""
        before, after = (self._parts(side).sum(1) for side in (0, 1))
        return float(before[0] / before[1]), float(after[0] / after[1])

    @property
    def alpha(self) -> tuple[float, float]:
        """Return the mean acceptance of both."""
        before, after = ([_side(pair, side) for pair in self.pairs] for side in (0, 1))
        return _alpha(before), _alpha(after)

    def gain(self, error: float) -> Interval:
        """Return the relative gain in goodput, with an interval that holds at all looks but for `error`."""
        return confidence_sequence(self.gains().tolist(), error)

    def gains(self) -> Floats:
        """Return one value a conversation whose average is the gain, and whose spread is the gain's (delta method)."""
        (before, cost_before), (after, cost_after) = (self._parts(side) for side in (0, 1))
        first, second = before.sum() / cost_before.sum(), after.sum() / cost_after.sum()
        moved = (after - second * cost_after) / cost_after.sum()
        moved -= (before - first * cost_before) / cost_before.sum() * second / first
        values: Floats = second / first - 1 + len(self.pairs) * moved / first
        return values

    def groups(self, name: Callable[[Pair], str], fewest: int) -> dict[str, Evidence]:
        """Split the pairs by domain or tenant. Groups of fewer than `fewest` are left out."""
        by_name: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            by_name.setdefault(name(pair), []).append(pair)
        return {key: Evidence(pairs, self.costs) for key, pairs in sorted(by_name.items()) if len(pairs) >= fewest}

    def without(self, tenant: str) -> Evidence:
        """Return the evidence of all other tenants."""
        return Evidence([pair for pair in self.pairs if pair.tenant != tenant], self.costs)

    def _parts(self, side: int) -> Floats:
        """Return `[2, pairs]`: expected tokens and cost of each pair, at the length chosen on those before it."""
        tokens, costs = self._by_length(side)
        chosen = numpy.arange(len(tokens)), _best_before(tokens, costs)[:-1] - 1
        return numpy.stack([tokens[chosen], costs[chosen]])

    def _by_length(self, side: int) -> tuple[Floats, Floats]:
        """Return expected tokens and cost of each pair at each length, `[pairs, G]`."""
        scores = [_side(pair, side) for pair in self.pairs]
        blocks = numpy.array([score.blocks for score in scores])
        prices = numpy.array([self.costs.of(gamma) for gamma in range(1, blocks.shape[1] + 1)])
        return numpy.array([score.tokens for score in scores]), blocks * prices


def _best_before(tokens: Floats, costs: Floats) -> NDArray[numpy.intp]:
    """Return `[pairs + 1]`: the best length by all pairs before each one, and by all of them at the end."""
    rates = tokens.cumsum(0) / costs.cumsum(0)
    return numpy.concatenate([[1], 1 + rates.argmax(1)])


def _alpha(scores: Sequence[Score]) -> float:
    return sum([score.alpha for score in scores]) / sum([score.positions for score in scores])


def _side(pair: Pair, side: int) -> Score:
    return pair.after if side else pair.before
