"""The first draft of a new answer: drawn by what its drafts may be worth, beside those of the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy

from distillspec.serving.base.rows import RowView
from distillspec.serving.selection.accepting import domain_index, sigmoid
from distillspec.serving.selection.base import SelectionParts
from distillspec.serving.selection.batch import NO_DRAFT, Prospect
from distillspec.serving.selection.dominance import SURE_DEVIATIONS
from distillspec.serving.selection.estimate import DraftsAcceptance
from distillspec.serving.selection.optimism import Optimism
from distillspec.serving.selection.prospects import Prospects
from distillspec.types import Floats, Ints


class FirstChances(NamedTuple):
    """P(a token is accepted) of each member of the pool, for a new answer.

    log_odds: mean and standard deviation, as they are known.
    mean: chances at the mean log-odds.
    drawn: chances that the draft is chosen by.
    optimistic: True for drafts that are estimated optimistically (`Optimism`).
    least: the least chances of these, 0 for other members.
    """

    log_odds: Sequence[tuple[float, float]]
    mean: Sequence[float]
    drawn: Sequence[float]
    optimistic: Sequence[bool]
    least: Sequence[float]

    def doubting(self, best: int) -> list[float]:
        """Return chances at which the best member is worse than it is expected to be, and each other one better."""
        return [
            sigmoid(mean + (-SURE_DEVIATIONS if index == best else SURE_DEVIATIONS) * deviation)
            for index, (mean, deviation) in enumerate(self.log_odds)
        ]


class FirstDraft(NamedTuple):
    """Choice of a member for a new answer. Members are told by their indices among the names.

    chosen: by the drawn chances.
    best: by the mean ones.
    is_certain: both are the same, and by the doubting chances too.
    lost: tokens that all rows lose for each one that the answer writes, 0 where `chosen` is the best.
    prospect: what members bring the answer, by the mean chances.
    """

    chosen: int
    best: int
    is_certain: bool
    lost: float
    prospect: Prospect


class FirstDrafts:
    """Draws chances of members, and chooses one of them. It learns nothing.

    Args:
        acceptance, optimism, prospects: of the selection.
    """

    def __init__(
        self, parts: SelectionParts, acceptance: DraftsAcceptance, optimism: Optimism, prospects: Prospects
    ) -> None:
        self.parts = parts
        self._acceptance = acceptance
        self._optimism = optimism
        self._prospects = prospects

    def drawn_chances(self, row: RowView, names: Sequence[str], known: Floats) -> FirstChances:
        """Draw the chances of all members from what is known of them (Thompson 1933).

        Args:
            known: features of the row.
        """
        draws, kind = Random(f"{self.parts.seed}/{row.sequence_id}"), domain_index(row)
        log_odds = [self._acceptance.log_odds(name, known) for name in names]
        mean = [sigmoid(center) for center, _ in log_odds]
        drawn = [sigmoid(center + draws.gauss(0, 1) * deviation) for center, deviation in log_odds]
        optimistic = [name not in self.parts.free and self._optimism.tries(name, kind) for name in names]
        least = [self._optimism.chance * is_optimistic for is_optimistic in optimistic]
        drawn = list(map(max, drawn, least)) if self._optimism.is_on else mean
        return FirstChances(log_odds, mean, drawn, optimistic, least)

    def best_for_all_rows(
        self,
        row: RowView,
        names: Sequence[str],
        able: Sequence[int],
        others: tuple[Sequence[Prospect], Ints],
        chances: FirstChances,
    ) -> FirstDraft:
        """Choose the member with which all rows together get the most tokens a second, by the drawn chances.

        Args:
            able: indices of the members that may draft for the row. Of equal ones the first is chosen.
            others: prospects of the other rows, and the indices of their members `[n]`.
        """
        beside, row_drafts = others[0], numpy.append(others[1], NO_DRAFT)
        prospects = [self._prospects.of(row, names, each) for each in (chances.mean, chances.drawn)]
        expected, by_drawn = (self._prospects.batch([*beside, prospect], names) for prospect in prospects)
        price = expected.rate(row_drafts)
        rates, drawn_rates = (batch.rates(row_drafts, len(beside), price) for batch in (expected, by_drawn))
        chosen = max(able, key=lambda index: drawn_rates[index])
        best = max(able, key=lambda index: rates[index])
        row_drafts[-1] = chosen
        rate = expected.rate(row_drafts, price, by_drawn) if any(chances.least) else rates[chosen]
        lost = len(row_drafts) * (rates[best] / rate - 1)
        doubting = self._prospects.of(row, names, chances.doubting(best))
        worst = self._prospects.batch([*beside, doubting], names).rates(row_drafts, len(beside), price)
        is_certain = chosen == best == max(able, key=lambda index: worst[index])
        return FirstDraft(chosen, best, is_certain, lost, prospects[0])
