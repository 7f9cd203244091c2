"""Draft model as proposer: chains of tokens from a small model with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.transfer import to_host
from distillspec.serving.base.tree import DRAFT, DraftProbs, TokenTree
from distillspec.serving.decoding.drafting import choose
from distillspec.serving.decoding.logits import Columns, Place
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.block_runner import BlockRunner
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.kv_cache import Prefix
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.state_runner import StateRunner
from distillspec.serving.proposers.base import ANY, EMPTY, ProposalRequest, Prospect
from distillspec.serving.proposers.continue_rule import ContinueRule
from distillspec.serving.proposers.draft_loop import DraftLoop, Drafts
from distillspec.serving.proposers.read_texts import DraftState, ReadTexts


@dataclass
class _Row:
    """One sequence's chain while it grows."""

    request: ProposalRequest
    state: DraftState
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # of the distributions that the tokens were drawn from
    drafting: bool = True
    speculation_length: int = 0  # tokens to draft
    carried: Tensor | None = None  # […] what the draft carries behind its newest token that was read

    @property
    def sequence(self) -> SequenceState:
        return self.request.sequence

    @property
    def slot(self) -> int:
        return self.sequence.held_slot

    @property
    def is_drawn(self) -> bool:
        """True if its tokens are judged by what they were drawn from. Greedy and seeded ones are judged by choice."""
        return not self.sequence.params.is_greedy and self.sequence.params.seed is None


class DraftModel:
    """Drafts with a model. Its cache has the target's slots, and rows do catch-up prefill when they draft next.

    A row whose draft logits are NaN gets the tokens drafted before, and no more speculation.

    Args:
        rule: which rows draft on, token by token.
        surer_than: drop the first token, and all behind it, that a draft with a confidence head expects to be accepted
            with at most this probability. Drawn tokens have no part in it, so verification stays exact.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: TokenSampler,
        target_cache: SlotCache,
        *,
        version: str = "",
        source: str = DRAFT,
        rule: ContinueRule | None = None,
        surer_than: float = 0.0,
        prepared: PreparedModel | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.reads_states = model.state_input is not None
        if self.reads_states:
            kind = BlockRunner if model.drafts_at_once else StateRunner
            self.runner: ModelRunner = kind(model, target_cache.another(), target_cache, prepared)
        else:
            self.runner = ModelRunner(model, target_cache.another(), prepared, recorder)
        self.sampler = sampler
        kept_ids = None if model.kept_ids is None else model.kept_ids.to(model.device)
        self.columns = Columns(model.identity.vocab_size, kept_ids)
        self.loop = DraftLoop(self.runner, self.columns, recorder)
        self.rule, self.surer_than = rule, surer_than
        self._version, self.source = version, source
        self.texts = ReadTexts(self.runner)
        self.attends = model.attends
        self.most = model.most_positions or ANY

    @property
    def version(self) -> str:
        return self._version

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        rows = [self._row(request) for request in requests]
        rows = [row for row in rows if row.state.sound and not row.state.skipped and self._has_room(row)]
        rows.sort(key=lambda row: row.slot)  # rows in slot order read the cache without copies
        if self.attends:
            ready = self.texts.catch_up([row.sequence for row in rows])
            rows = [row for row in rows if row.sequence.id in ready]
        draft = self._draft_at_once if rows and self.can_draft_at_once(rows) else self._draft_one_by_one
        probs = draft(rows)
        table = None if probs is None else DraftProbs(probs, self.columns.kept_ids)
        trees = {row.sequence.id: self._tree(row, table) for row in rows}
        return [trees.get(request.sequence.id, EMPTY) for request in requests]

    def state(self, sequence_id: str) -> DraftState:
        """Return what the draft knows of a sequence. Nothing yet, if it is new."""
        return self.texts.state(sequence_id)

    def prospect(self, sequence: SequenceState) -> Prospect:
        """Return a prospect of no tokens for sequences that the draft does not read."""
        state = self.state(sequence.id)
        if state.skipped or not state.sound:
            return Prospect(0)
        unread = len(sequence.tokens) - state.computed if self.attends else 1
        return Prospect(self.most, unread_tokens=unread, source=self.source, at_once=self.runner.one_pass)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Keep what the cache holds of the accepted tokens, whoever proposed them.

        The last drafted token was never read, so after full acceptance two tokens are unread. A draft that reads states
        has read drafted tokens behind its own states, and reads them again behind the target's.
        """
        state = self.state(sequence.id)
        same = 0
        if self.reads_states:
            state.drafted = ()
            return
        for drafted, node in zip(state.drafted[:-1], path, strict=False):
            if drafted != tree.tokens[node]:
                break
            same += 1
        state.computed, state.drafted = state.computed + same, ()

    def release(self) -> None:
        """See `ModelRunner.release`."""
        self.runner.release()
        self.loop.release()

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """See `ReadTexts.enter_slot`."""
        self.texts.enter_slot(sequence, prefix)

    def leave_slot(self, sequence: SequenceState) -> None:
        """See `ReadTexts.leave_slot`."""
        self.texts.leave_slot(sequence)

    @property
    def caches(self) -> Sequence[SlotCache]:
        return (self.runner.cache,)

    def distrust(self, sequence: SequenceState) -> None:
        """See `ReadTexts.distrust`."""
        self.texts.distrust(sequence)

    def skip(self, sequence: SequenceState) -> None:
        state = self.state(sequence.id)
        state.skipped = state.skipped or state.computed == 0

    def assume_read(self, sequence: SequenceState, tokens: int) -> None:
        self.state(sequence.id).computed = tokens

    def can_draft_at_once(self, rows: Sequence[_Row]) -> bool:
        """Return True if one loop can draft all rows.

        Where passes are not recorded, rows of unlike lengths are cheaper one by one: short ones leave early.
        """
        together = self.loop.records or self.runner.one_pass or len({row.speculation_length for row in rows}) == 1
        return together and self.rule is None

    def _draft_at_once(self, rows: Sequence[_Row]) -> Tensor | None:
        """Draft all tokens of all rows with one device read. Return what drawn ones were drawn from `[n, width]`."""
        count = max(row.speculation_length for row in rows)
        draws = self.sampler.draws([Place(row.sequence) for row in rows], count, self.columns)
        drafts = self.loop.run([self._input(row) for row in rows], count, draws)
        seen = to_host(torch.cat([drafts.ids, drafts.finite, self._likely(drafts)], 1)).tolist()
        for r, (row, found) in enumerate(zip(rows, seen, strict=True)):
            sound, likely = sum(found[count : 2 * count]), sum(found[2 * count :])
            row.tokens = _until_stop(found[: min(sound, likely, row.speculation_length)], row.sequence.stop_ids)
            row.rows = list(range(r * count, r * count + len(row.tokens)))
            if sound < count:
                self._give_up(row)
        if drafts.probs is None:
            return None
        probs = drafts.probs.clone() if self.loop.records else drafts.probs  # the next replay overwrites them
        return probs.flatten(0, 1)

    def _likely(self, drafts: Drafts) -> Tensor:
        """Return `[B, count]` bool: False from the first token on that the draft expects to be rejected."""
        if drafts.predicted is None or self.surer_than == 0:
            return torch.ones_like(drafts.finite)
        return (drafts.predicted > self.surer_than).long().cumprod(1).bool()

    def _draft_one_by_one(self, rows: Sequence[_Row]) -> Tensor | None:
        """Draft one token of every row at a time, with a device read each. Returns what `_draft_at_once` does."""
        probs: list[Tensor] = []
        for step in range(max((row.speculation_length for row in rows), default=0)):
            drafting = [row for row in rows if row.drafting]
            if not drafting:
                break
            chosen = self._draft_one(drafting, step, sum(map(len, probs)))
            if chosen is not None:
                probs.append(chosen)
        return torch.cat(probs) if probs else None

    def _draft_one(self, rows: Sequence[_Row], step: int, first: int) -> Tensor | None:
        """Draft one token of each row. Its distribution becomes row `first` + r of all. Return those of this step."""
        inputs = [self._input(row) for row in rows]
        carried = self._read(rows, inputs, step)
        newest = torch.tensor([entry.tokens[-1] for entry in inputs], device=carried.device)
        logits = self.runner.logits(carried, step, newest)
        places = [Place(row.sequence, tuple(row.tokens)) for row in rows]
        choice = choose(logits.float(), self.sampler.draws(places, 1, self.columns), 0, self.loop.hashed)
        tokens, finite = to_host(torch.stack([self.columns.ids(choice.columns), choice.finite.long()])).tolist()
        goes_on = self.rule.keeps(logits, step) if self.rule is not None else [True] * len(rows)
        for r, (row, token, keep) in enumerate(zip(rows, tokens, goes_on, strict=True)):
            if not finite[r]:
                self._give_up(row)
                continue
            row.tokens.append(token)
            row.rows.append(first + r)
            full = len(row.tokens) >= row.speculation_length
            row.drafting = keep and not full and token not in row.sequence.stop_ids
        return choice.probs

    def _read(self, rows: Sequence[_Row], inputs: Sequence[RowInput], step: int) -> Tensor:
        """Read the rows' text, or the one token behind what each has drafted. Return what they carry `[B, …]`."""
        count = max(row.speculation_length for row in rows)
        if step == 0:
            carried = self.runner.begin(self.runner.prepare(inputs, count), count)
        else:
            before = torch.stack([row.carried for row in rows if row.carried is not None])
            carried = before if self.runner.one_pass else self.runner.follow(self.runner.prepare(inputs), before, step)
        for row, own in zip(rows, carried, strict=True):
            row.carried = own
        return carried

    def _row(self, request: ProposalRequest) -> _Row:
        length = min(request.speculation_length, self.most)
        return _Row(request, self.state(request.sequence.id), speculation_length=length)

    def _has_room(self, row: _Row) -> bool:
        """Return False at the context's end, where a block's masks have no place."""
        return not self.runner.one_pass or len(row.sequence.tokens) + self.most <= self.runner.cache.max_len

    def _give_up(self, row: _Row) -> None:
        """End speculation for a row whose draft logits are NaN."""
        row.drafting = row.state.sound = False
        row.sequence.speculation_failed = True
        self.runner.cache.clear(row.slot)

    def _input(self, row: _Row) -> RowInput:
        """Return the tokens that the draft has not read: text first, later its own last token."""
        sequence = row.sequence
        if row.tokens:
            return RowInput(row.slot, row.state.computed + len(row.tokens) - 1, row.tokens[-1:])
        start = row.state.computed if self.attends else len(sequence.tokens) - 1
        row.state.computed = len(sequence.tokens)
        return RowInput(row.slot, start, sequence.tokens[start:])

    def _tree(self, row: _Row, table: DraftProbs | None) -> TokenTree:
        row.state.drafted = tuple(row.tokens)
        return TokenTree.chain(row.tokens, table if row.is_drawn else None, row.rows, self.source)


def _until_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to and with the first stop token."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return list(tokens[:end])
