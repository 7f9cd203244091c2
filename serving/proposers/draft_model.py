"""Draft model as proposer: chains of tokens from a small model with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import Attend, SlotCache, masked_attention
from distillspec.serving.base.catch_up import ALONG, MOST
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.transfer import to_host
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.drafting import choose
from distillspec.serving.decoding.logits import Columns, Place
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.kv_cache import Move
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Prospect
from distillspec.serving.proposers.draft_loop import DraftLoop


class ContinueRule(Protocol):
    """Decides after every draft step which rows continue."""

    def keeps(self, logits: Tensor, step: int) -> list[bool]:
        """Return which rows continue.

        Args:
            logits: `[B, width]` raw, of the rows still drafting.
            step: the draft token (0, 1, …) that was taken from them.
        """
        ...


class ConfidenceThreshold:
    """Draft on while the draft's best probability exceeds a threshold (SmartSpec, Algorithm 3)."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keeps(self, logits: Tensor, step: int) -> list[bool]:
        return to_host(torch.softmax(logits.float(), -1).amax(-1) > self.threshold).tolist()


@dataclass
class _Row:
    """One sequence's chain while it grows."""

    request: ProposalRequest
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] | Tensor = field(default_factory=list)  # [width] each
    drafting: bool = True

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
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: TokenSampler,
        slots: int,
        max_len: int,
        *,
        version: str = "",
        rule: ContinueRule | None = None,
        prepared: PreparedModel | None = None,
        recorder: Recorder | None = None,
        attend: Attend = masked_attention,
    ) -> None:
        self.runner = ModelRunner(model, slots, max_len, prepared, recorder, attend)
        self.sampler = sampler
        kept_ids = None if model.kept_ids is None else model.kept_ids.to(model.device)
        self.columns = Columns(model.identity.vocab_size, kept_ids)
        self.loop = DraftLoop(self.runner, self.columns, recorder)
        self.rule = rule
        self._version = version
        self._drafted: dict[str, int] = {}

    @property
    def version(self) -> str:
        return self._version

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        rows = [_Row(request) for request in requests if request.sequence.draft_ok and request.sequence.uses_draft]
        rows.sort(key=lambda row: row.slot)  # rows in slot order read the cache without copies
        rows = self._catch_up(rows)
        if rows and self.can_draft_at_once(rows):
            self._draft_at_once(rows)
        else:
            self._draft_one_by_one(rows)
        trees = {row.sequence.id: self._tree(row) for row in rows}
        return [trees.get(request.sequence.id, EMPTY) for request in requests]

    def prospect(self, sequence: SequenceState) -> Prospect:
        """Return a prospect of no tokens for sequences that the draft does not read."""
        return Prospect() if sequence.uses_draft else Prospect(0)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        # The last drafted token was never read, so after full acceptance two tokens are unread.
        drafted = self._drafted.pop(sequence.id, None)
        if drafted is not None:
            sequence.draft_computed += min(len(path), max(drafted - 1, 0))

    def move(self, moves: Sequence[Move]) -> None:
        self.runner.move(moves)

    def release(self) -> None:
        """See `ModelRunner.release`."""
        self.runner.release()
        self.loop.release()

    def forget(self, sequence_id: str) -> None:
        self._drafted.pop(sequence_id, None)

    @property
    def caches(self) -> Sequence[SlotCache]:
        return (self.runner.cache,)

    def distrust(self, sequence: SequenceState) -> None:
        """See `KeepsCache`. NaN left in a slot would reach the next sequence there."""
        self.runner.cache.clear(sequence.held_slot)
        sequence.draft_computed, sequence.draft_unchecked = 0, False

    def _catch_up(self, rows: Sequence[_Row]) -> list[_Row]:
        """Do catch-up prefill of rows that are far behind, and return the rows that can draft now.

        At most `MOST` tokens a step, in slot order. Rows still behind decode without drafts meanwhile.
        """
        room, ready, inputs = MOST, [], []
        for row in rows:
            tokens, start = row.sequence.tokens, row.sequence.draft_computed
            unread_tokens = len(tokens) - start
            if unread_tokens > ALONG and room > 0:
                end = start + min(unread_tokens - 1, room)  # drafting reads the newest token
                inputs.append(RowInput(row.slot, start, tokens[start:end], wanted=0))
                row.sequence.draft_computed = end
                row.sequence.draft_unchecked = len(tokens) - end > ALONG  # else it drafts in this step
                room -= end - start
            if len(tokens) - row.sequence.draft_computed <= ALONG:
                ready.append(row)
        if inputs:
            self.runner.read(inputs)
        return ready

    def can_draft_at_once(self, rows: Sequence[_Row]) -> bool:
        """Return True if one loop can draft all rows.

        Where passes are not recorded, rows of unlike lengths are cheaper one by one: short ones leave early.
        """
        even = self.loop.records or len({row.request.length for row in rows}) == 1
        return even and self.rule is None

    def _draft_at_once(self, rows: Sequence[_Row]) -> None:
        """Draft all tokens of all rows with one device read."""
        count = max(row.request.length for row in rows)
        draws = self.sampler.draws([Place(row.sequence) for row in rows], count, self.columns)
        drafts = self.loop.run([self._input(row) for row in rows], count, draws)
        probs = None if drafts.probs is None else drafts.probs.clone()  # the next replay overwrites them
        seen = to_host(torch.cat([drafts.ids, drafts.finite], 1)).tolist()
        for r, (row, found) in enumerate(zip(rows, seen, strict=True)):
            sound = sum(found[count:])
            row.tokens = _until_stop(found[: min(sound, row.request.length)], row.sequence.stop_ids)
            if probs is not None and row.is_drawn:
                row.probs = probs[r, : len(row.tokens)]
            if sound < count:
                self._give_up(row)

    def _draft_one_by_one(self, rows: Sequence[_Row]) -> None:
        """Draft one token of every row at a time, with a device read each."""
        for step in range(max((row.request.length for row in rows), default=0)):
            drafting = [row for row in rows if row.drafting]
            if not drafting:
                break
            self._draft_one(drafting, step)

    def _draft_one(self, rows: Sequence[_Row], step: int) -> None:
        inputs = [self._input(row) for row in rows]
        logits = self.runner.logits(self.runner.read(inputs))
        places = [Place(row.sequence, tuple(row.tokens)) for row in rows]
        choice = choose(logits.float(), self.sampler.draws(places, 1, self.columns), 0, self.loop.hashed)
        tokens, finite = to_host(torch.stack([self.columns.ids(choice.columns), choice.finite.long()])).tolist()
        goes_on = self.rule.keeps(logits, step) if self.rule is not None else [True] * len(rows)
        for r, (row, token, keep) in enumerate(zip(rows, tokens, goes_on, strict=True)):
            if not finite[r]:
                self._give_up(row)
                continue
            row.tokens.append(token)
            if choice.probs is not None and row.is_drawn and isinstance(row.probs, list):
                row.probs.append(choice.probs[r])
            full = len(row.tokens) >= row.request.length
            row.drafting = keep and not full and token not in row.sequence.stop_ids

    def _give_up(self, row: _Row) -> None:
        """End speculation for a row whose draft logits are NaN."""
        row.drafting = row.sequence.draft_ok = False
        self.runner.cache.clear(row.slot)

    def _input(self, row: _Row) -> RowInput:
        """Return the tokens that the draft has not read: text first, later its own last token."""
        sequence = row.sequence
        if row.tokens:
            return RowInput(row.slot, sequence.draft_computed + len(row.tokens) - 1, row.tokens[-1:])
        start = sequence.draft_computed
        sequence.draft_computed = len(sequence.tokens)
        return RowInput(row.slot, start, sequence.tokens[start:])

    def _tree(self, row: _Row) -> TokenTree:
        self._drafted[row.sequence.id] = len(row.tokens)
        drawn = len(row.probs) > 0
        probs = row.probs if isinstance(row.probs, Tensor) else torch.stack(row.probs) if drawn else None
        return TokenTree.chain(row.tokens, probs, self.columns.kept_ids)


def _until_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to and with the first stop token."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return list(tokens[:end])
