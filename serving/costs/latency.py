"""Latency model: seconds of a step from its tokens, rows and context (SmartSpec, Liu et al. 2024, Eq. 7 and 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from distillspec.errors import ConfigError
from distillspec.serving.base.catch_up import CATCH_UP_TOKENS_A_STEP, READ_WITH_DRAFTING, catch_up_cost
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.ladder import Recorded
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.table import CostTable


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of whole steps: the draft's passes, then one pass of the target.

    A draft takes one pass a depth over the rows that still draft. A draft of blocks takes a single pass, which computes
    as many positions for each row as the deepest row drafts.

    Args:
        target: a pass of the target, over decoding rows and prompt tokens together.
        draft: a pass of the draft. None where proposals come without a model.
        draft_free_s: proposals without a model, a step.
        drafts_block: one pass of the draft gives all its tokens. Costs that were learnt from steps leave it False: rows
            tell it of their drafts (see `of_draft`).
        members: a pass of each of several drafts, by source. Others cost as `draft`.

    Raises:
        ConfigError: `draft_free_s` is negative or not finite.
    """

    target: CostTable
    draft: CostTable | None = None
    draft_free_s: float = 5e-4
    drafts_block: bool = False
    members: Mapping[str, CostTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.draft_free_s < float("inf"):
            raise ConfigError(f"draft_free_s={self.draft_free_s} must be finite and at least 0 seconds")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as files have them, where `drafts_block` is called `at_once`."""
        stored = asdict(self)
        stored["at_once"] = stored.pop("drafts_block")
        return stored

    def table_of(self, source: str) -> CostTable | None:
        """Return the costs of one draft's passes. None where proposals come without a model."""
        return self.members.get(source, self.draft)

    def changed(self, change: DraftChange) -> LatencyModel:
        """Return the same costs where one of several drafts is another: what it is known to cost by its size."""
        known = self.table_of(change.like or change.source)
        if change.like is None or known is None:
            return self
        return replace(self, members={**self.members, change.source: known.scaled(change.times)})

    def recorded_in(self, recorded: Recorded) -> LatencyModel:
        """Return the same costs on a device that records passes in these numbers of tokens."""
        tables = {source: replace(table, recorded=recorded.drafts) for source, table in self.members.items()}
        draft = None if self.draft is None else replace(self.draft, recorded=recorded.drafts)
        return replace(self, target=replace(self.target, recorded=recorded.target), draft=draft, members=tables)

    def of_draft(self, source: str = DRAFT, *, drafts_block: bool | None = None) -> LatencyModel:
        """Return the same costs with one draft's passes.

        Args:
            source: its name, where there are several.
            drafts_block: as its rows tell, None: as this model has it. To read a text costs the same either way.
        """
        draft = self.table_of(source)
        if drafts_block is None:
            drafts_block = self.drafts_block
        if drafts_block == self.drafts_block and draft is self.draft:
            return self
        return replace(self, draft=draft, drafts_block=drafts_block)

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
        """Return the seconds of all draft passes.

        `by_model` is False for rows whose tokens come without the model. All such rows together cost `draft_free_s`.
        """
        if self.draft is None:
            return self.draft_free_s if any(lengths) else 0.0
        if by_model is not None and not all(by_model):
            drafting = list(zip(lengths, by_model, strict=True))
            free = any(length and not with_model for length, with_model in drafting)
            lengths = [length if with_model else 0 for length, with_model in drafting]
            return self.draft_s(contexts, lengths) + (self.draft_free_s if free else 0.0)
        return self._passes_s(self.draft, draft_work(contexts, lengths, self.drafts_block))

    def trees_s(self, work: Sequence[tuple[int, Sequence[int]]]) -> float:
        """Return the seconds of all draft passes of trees.

        Args:
            work: of each row the cached tokens, and the nodes that the draft reads at each level.
        """
        contexts, reads = zip(*work, strict=True)
        depths = list(map(len, reads))
        if self.draft is None or self.drafts_block:
            return self.draft_s(contexts, depths)
        chains = draft_work(contexts, depths, drafts_block=False)
        return self._passes_s(self.draft, chains._replace(passes=list(map(sum, zip_longest(*reads, fillvalue=0)))))

    @staticmethod
    def _passes_s(draft: CostTable, work: DraftWork) -> float:
        further_s = draft.per_context * work.context + draft.per_row * work.rows
        further_s += draft.first if work.passes else 0.0
        return further_s + sum([draft.seconds(0, tokens) for tokens in work.passes])

    def catch_up_s(self, unread_tokens: Sequence[int]) -> float:
        """Return the seconds of catch-up prefill of rows that draft, by their unread tokens."""
        if self.draft is None:
            return 0.0
        (tokens, passes), rows = catch_up_cost(unread_tokens), len(unread_tokens)
        if passes:
            return self.draft.seconds(0, tokens)
        return self.draft.seconds(0, rows + tokens) - self.draft.seconds(0, rows) if tokens else 0.0

    def reading_s(self, unread_tokens: int, source: str = DRAFT) -> float:
        """Return the seconds in which one of the drafts reads a text that it is far behind in, over as many steps."""
        if unread_tokens <= READ_WITH_DRAFTING:
            return 0.0
        steps = max(1.0, unread_tokens / CATCH_UP_TOKENS_A_STEP)
        return steps * self.of_draft(source).catch_up_s([unread_tokens])

    def alike_s(self, rows: int, context: float, length: int) -> float:
        """Return the seconds of a step in which each row drafts `length` tokens. `context` is of all rows together."""
        target_s = self.target.seconds(context, rows * (length + 1), rows)
        return target_s + (self.loop_s(rows, context, length) if length else 0.0)

    def loop_s(self, rows: int, context: float, length: int) -> float:
        """Return the seconds in which the draft drafts `length` tokens a row. `context` is of all rows together."""
        if self.draft is None:
            return self.draft_free_s
        if self.drafts_block:
            return self.draft.first + self.draft.seconds(context, rows * length, rows)
        return self.draft.first + length * self.draft.seconds(context, rows, rows)

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


class DraftWork(NamedTuple):
    """Work of all draft passes of a step: tokens of each pass, and cached tokens and rows, summed over the passes."""

    passes: list[int]
    context: int
    rows: int


def draft_work(contexts: Sequence[int], lengths: Sequence[int], drafts_block: bool) -> DraftWork:
    """Return the work of drafting `lengths[i]` tokens behind `contexts[i]`. Depth s runs over rows of length ≥ s."""
    deepest = max(lengths, default=0)
    if drafts_block:
        drafting = [context for context, length in zip(contexts, lengths, strict=True) if length]
        return DraftWork([len(drafting) * deepest] if drafting else [], sum(drafting), len(drafting))
    passes = [sum([length >= depth for length in lengths]) for depth in range(1, deepest + 1)]
    # A row takes part in as many passes as it drafts tokens.
    read = sum([context * length for context, length in zip(contexts, lengths, strict=True)])
    return DraftWork(passes, read, sum(lengths))


def guessed() -> LatencyModel:
    """Return assumed costs of steps on a machine that was not measured, to be corrected by steps."""
    return LatencyModel(CostTable.line(1e-7, 1e-3, 2e-2), CostTable.line(1e-8, 1e-4, 2e-3))
