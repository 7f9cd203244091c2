"""Simple rules of selection, to compare with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Sequence
from random import Random

from distillspec.errors import ConfigError
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import RowView
from distillspec.serving.selection.base import Choices, SelectionParts, SelectionState, members_of
from distillspec.serving.selection.loss_meter import LossMeter
from distillspec.serving.selection.rewards import ALL, Rewards, row_rewards

REMEMBERED = 1000  # prompts


class ByRequest(SelectionState, ABC):
    """Chooses once a request, by `pick`. A row whose draft cannot draft for it gets another one until it can."""

    def __init__(self, free: Sequence[str] = ()) -> None:
        super().__init__(free)
        self._chosen: dict[str, str] = {}
        self._instead: dict[str, str] = {}  # of rows whose draft cannot draft for them

    @abstractmethod
    def pick(self, row: RowView, drafts: Sequence[str]) -> str:
        """Return one of the row's members. Asked once a row, and again in place of a draft that cannot draft."""

    def learn(self, result: StepResult, chosen: Choices) -> None:
        """Learn from a step. By default nothing."""
        return

    def keep_only(self, alive: Collection[str]) -> None:
        """Forget all rows but these."""
        self._chosen = {name: draft for name, draft in self._chosen.items() if name in alive}
        self._instead = {name: draft for name, draft in self._instead.items() if name in alive}

    def choose(self, rows: Sequence[RowView]) -> Choices:
        return {row.sequence_id: self._of(row) for row in rows}

    def observe(self, result: StepResult, chosen: Choices) -> None:
        self.learn(result, chosen)
        if (alive := self.rows_to_keep(result)) is not None:
            self.keep_only(alive)

    def draft_changed(self, change: DraftChange) -> None:
        """Nothing is known of drafts."""
        return

    def _of(self, row: RowView) -> str | None:
        name, drafts = row.sequence_id, members_of(row, self.free)
        chosen = self._chosen.get(name)
        if not drafts:
            return None
        if chosen in drafts:
            return chosen
        picked = self._chosen if chosen is None else self._instead
        if picked.get(name) not in drafts:
            picked[name] = self.pick(row, drafts)
        return picked[name]


class Fixed(ByRequest):
    """The same draft for every request, the next one where it cannot draft.

    Args:
        draft: its name, or that of a source without a model. None: the first draft.
    """

    def __init__(self, parts: SelectionParts, draft: str | None = None) -> None:
        super().__init__(parts.free)
        members = (*parts.drafts, *parts.free)
        if draft is not None and draft not in members:
            raise ConfigError(f"selection_options.draft={draft} is no draft; there are {', '.join(members)}")
        self.draft = draft

    def pick(self, row: RowView, drafts: Sequence[str]) -> str:
        return drafts[0] if self.draft is None or self.draft not in drafts else self.draft


class LookupElseModel(Fixed):
    """A source without a model where it has something to propose, else the first draft."""

    def choose(self, rows: Sequence[RowView]) -> Choices:
        choices = dict(super().choose(rows))
        for row in rows:
            if any(option.limit and not option.drafted_by_model for option in row.options):
                choices[row.sequence_id] = None
        return choices


class Drawn(ByRequest):
    """A draft drawn for each request."""

    def __init__(self, parts: SelectionParts) -> None:
        super().__init__(parts.free)
        self.seed = parts.seed

    def pick(self, row: RowView, drafts: Sequence[str]) -> str:
        return Random(f"{self.seed}/{row.sequence_id}").choice(drafts)


class EpsilonGreedy(ByRequest):
    """The draft of the most tokens a second so far, and for a share of the requests a drawn one.

    Args:
        epsilon: that share.
    """

    def __init__(self, parts: SelectionParts, epsilon: float = 0.2) -> None:
        super().__init__(parts.free)
        if not 0 <= epsilon <= 1:
            raise ConfigError(f"selection_options.epsilon={epsilon} must be in [0, 1]")
        self.seed, self.epsilon = parts.seed, epsilon
        self._rewards, self._meter = Rewards(), LossMeter(parts.latency)
        self.losses = self._meter.losses
        self._tried: dict[str, str] = {}  # rows that tried a drawn draft in place of the best one, and that draft

    def pick(self, row: RowView, drafts: Sequence[str]) -> str:
        draws, rates = Random(f"{self.seed}/{row.sequence_id}"), self._rewards.rates(ALL)
        unknown = [source for source in drafts if source not in rates]
        best = None if unknown else max(drafts, key=lambda source: rates[source])
        if best is not None and draws.random() >= self.epsilon:
            return best
        if (drawn := draws.choice(unknown or list(drafts))) != best:
            self._tried[row.sequence_id] = drawn
        return drawn

    def choose(self, rows: Sequence[RowView]) -> Choices:
        choices = super().choose(rows)
        self.on_trial = {name for name, source in choices.items() if source and self._tried.get(name) == source}
        return choices

    def learn(self, result: StepResult, chosen: Choices) -> None:
        rewards = row_rewards(result, chosen)
        for reward in rewards:
            self._rewards.add((ALL, reward.source), reward.tokens, reward.seconds)
        self._meter.count(result, rewards, self.on_trial)

    def keep_only(self, alive: Collection[str]) -> None:
        super().keep_only(alive)
        self._tried = {name: draft for name, draft in self._tried.items() if name in alive}

    def draft_changed(self, change: DraftChange) -> None:
        self._rewards.forget(change.source)
        self._meter.forget(change.source)


class ByPromptLength(ByRequest):
    """The longer a prompt is among those seen, the dearer its draft (the greedy baseline of SPIN, Chen et al. 2025)."""

    def __init__(self, parts: SelectionParts) -> None:
        super().__init__(parts.free)
        self.latency = parts.latency
        self._lengths: list[int] = []  # of the last prompts, sorted
        self._seen = deque[int]()  # the same in their order

    def pick(self, row: RowView, drafts: Sequence[str]) -> str:
        length, latency = len(row.prompt), self.latency()
        insort(self._lengths, length)
        self._seen.append(length)
        if len(self._seen) > REMEMBERED:
            self._lengths.remove(self._seen.popleft())
        models = [source for source in drafts if source not in self.free]
        costs = {source: latency.of_draft(source).loop_s(1, 0, 1) for source in models}
        by_cost = sorted(drafts, key=lambda source: costs.get(source, 0.0))
        rank = bisect_right(self._lengths, length) / len(self._lengths)
        return by_cost[min(len(by_cost) - 1, int(rank * len(by_cost)))]
