"""Learning-based selection of SPIN (Chen et al. 2025): explore in chunks, average, match, exploit 2^k slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import numpy
from scipy.optimize import linear_sum_assignment

from distillspec.errors import ConfigError
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import ANY, RowView
from distillspec.serving.selection.base import Choices, SelectionParts, SelectionState, members_of
from distillspec.serving.selection.loss_meter import LossMeter
from distillspec.serving.selection.rewards import ALL, Rewards, row_rewards


class Lbss(SelectionState):
    """Epoch k explores, then serves 2^k steps by a maximum-weight matching of rows and drafts.

    A slot of the paper is a step here. While it explores, each row has a drawn draft, the same for a chunk of steps.
    Rewards are averaged over all epochs, by row and draft. Where a pair was not seen, the draft's mean counts. Rows
    beyond the drafts' places run without one.

    Args:
        chunks: of exploration in an epoch.
        chunk: steps.
        places: rows that a draft serves at a time (B_j), 0: all. One number for all drafts, or by name, as memory or a
            limit on batches allows. Drafts left out serve all rows.
        first: k of the first epoch.
        fast_switching: a row's draft of the next chunk, or the one that it will likely be matched with, reads its text
            ahead.
    """

    def __init__(
        self,
        parts: SelectionParts,
        chunks: int = 2,
        chunk: int = 16,
        places: int | Mapping[str, int] = 0,
        first: int = 6,
        fast_switching: bool = True,
    ) -> None:
        super().__init__(parts.free)
        by_draft, others = (dict(places), 0) if isinstance(places, Mapping) else ({}, places)
        members = (*parts.drafts, *parts.free)
        if unknown := [name for name in by_draft if name not in members]:
            there = ", ".join(members)
            raise ConfigError(f"selection_options.places.{unknown[0]} is no draft; there are {there}")
        numbers = {"chunks": chunks, "chunk": chunk, "places": min([others, *by_draft.values()]), "first": first}
        for name, value in numbers.items():
            least = int(name.startswith("chunk"))
            if value < least:
                raise ConfigError(f"selection_options.{name}={value} must be at least {least}")
        self.seed = parts.seed
        self.chunks = chunks
        self.chunk = chunk
        self._by_draft, self._others = by_draft, others  # places of drafts, by name and of those left out
        self.fast_switching = fast_switching
        self.first = first
        self.epoch, self._slot = first, 0  # the epoch, and how many of its steps are over
        self._rewards, self._meter = Rewards(), LossMeter(parts.latency)
        self.losses = self._meter.losses
        self._matched: dict[str, str | None] = {}  # while it exploits
        self._foreseen: dict[str, str | None] = {}  # in the last chunk of exploration

    @property
    def explores(self) -> bool:
        """True while the epoch explores."""
        return self._slot < self.chunks * self.chunk

    def choose(self, rows: Sequence[RowView]) -> Choices:
        if self.explores:
            choices = self._drawn(rows, self._slot)
            self.on_trial = set(choices)
            self.coming = self._ahead(rows, choices)
            return choices
        self.on_trial = ()
        able = {row.sequence_id: members_of(row, self.free) for row in rows}
        kept = {row: draft for row in able if (draft := self._matched.get(row)) is not None and draft in able[row]}
        if len(kept) < len(able):
            new = self._match({row: members for row, members in able.items() if row not in kept}, kept)
            self._matched = {**kept, **new}
        choices = {row: self._matched[row] for row in able}
        self.coming = self._ahead(rows, choices)
        return choices

    def observe(self, result: StepResult, chosen: Choices) -> None:
        rewards = row_rewards(result, chosen)
        for reward in rewards:
            self._rewards.add((reward.row, reward.source), reward.tokens, reward.seconds)
            self._rewards.add((ALL, reward.source), reward.tokens, reward.seconds)
        self._meter.count(result, rewards, self.on_trial)
        if not result.view.rows:
            return
        self._slot += 1
        if self._slot >= self.chunks * self.chunk + 2**self.epoch:
            self._begin_epoch(self.epoch + 1)
        if (alive := self.rows_to_keep(result)) is not None:
            self._rewards.keep_only([ALL, *alive])

    def draft_changed(self, change: DraftChange) -> None:
        """Explore again, in epochs as short as the first ones: a draft without rewards is matched with no row."""
        self._rewards.forget(change.source)
        self._meter.forget(change.source)
        self._begin_epoch(self.first)

    def _begin_epoch(self, epoch: int) -> None:
        """Explore again, and forget the matching."""
        self.epoch, self._slot = epoch, 0
        self._matched = {}

    def _ahead(self, rows: Sequence[RowView], now: Choices) -> Mapping[str, str]:
        """Return the rows that will have another draft a chunk of steps from now, and that draft.

        Drawn ones are known. The matching after exploration is predicted when the last chunk begins, by the rewards so
        far. Rows that come later are left out.
        """
        explores, later = self.chunks * self.chunk, self._slot + self.chunk
        over = later - explores - 2**self.epoch
        if not rows or not self.fast_switching:
            return {}
        if over >= 0:
            coming = self._drawn(rows, over, self.epoch + 1)
        elif later < explores:
            coming = self._drawn(rows, later)
        elif self.explores:
            if self._slot % self.chunk == 0:
                self._foreseen = self._match({row.sequence_id: members_of(row, self.free) for row in rows}, {})
            coming = {name: self._foreseen.get(name) for name in now}
        else:
            return {}  # rows keep what they were matched with
        return {row: source for row, source in coming.items() if source is not None and source != now[row]}

    def _drawn(self, rows: Sequence[RowView], slot: int, epoch: int | None = None) -> dict[str, str | None]:
        """Return a drawn draft for each row, the same for all steps of a chunk."""
        key, taken = f"{self.seed}/{self.epoch if epoch is None else epoch}/{slot // self.chunk}", Counter[str]()
        drawn: dict[str, str | None] = {}
        for row in rows:
            free = [source for source in members_of(row, self.free) if self._has_place(source, taken)]
            drawn[row.sequence_id] = draft = Random(f"{key}/{row.sequence_id}").choice(free) if free else None
            taken.update([] if draft is None else [draft])
        return drawn

    def _match(self, able: dict[str, list[str]], kept: dict[str, str]) -> dict[str, str | None]:
        """Return the matching of highest total reward of rows that have no draft yet."""
        taken = Counter(kept.values())
        sources = sorted({source for members in able.values() for source in members})
        places_left = [min(len(able), self._places(source) - taken[source]) for source in sources]
        seats = [source for source, count in zip(sources, places_left, strict=True) for _ in range(count)]
        seats += [""] * len(able)  # no draft
        weights = numpy.array(
            [[self._reward(row, source, members) for source in seats] for row, members in able.items()]
        )
        row_indices, seat_indices = linear_sum_assignment(weights, maximize=True)
        rows = list(able)
        return {
            rows[row]: seats[seat] or None
            for row, seat in zip(row_indices.tolist(), seat_indices.tolist(), strict=True)
        }

    def _reward(self, row: str, source: str, able: Sequence[str]) -> float:
        if not source:
            return 0.0
        if source not in able:
            return -1.0
        known = self._rewards.rate((row, source))
        return (self._rewards.rate((ALL, source)) or 0.0) if known is None else known

    def _has_place(self, source: str, taken: Counter[str]) -> bool:
        return taken[source] < self._places(source)

    def _places(self, source: str) -> int:
        return self._by_draft.get(source, self._others) or ANY
