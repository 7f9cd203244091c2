"""A draft model as proposer: chains of tokens, drawn one after another from a small model with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import Attend, masked_attention
from distillspec.serving.control.reading import ALONG, MOST
from distillspec.serving.graphs import Recorder
from distillspec.serving.kv_cache import Move
from distillspec.serving.logits import Columns, Place, needs_transform
from distillspec.serving.packed_linear import PackedLinears
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Prospect
from distillspec.serving.proposers.draft_loop import DraftLoop, Draws
from distillspec.serving.requests import Sequence
from distillspec.serving.runner import ModelRunner, RowInput
from distillspec.serving.sampling import TokenSampler
from distillspec.serving.transfer import to_device, to_host
from distillspec.serving.tree import TokenTree


class ContinueRule(Protocol):
    """Asked after every draft step which rows draft on."""

    def keeps(self, logits: Tensor, step: int) -> list[bool]:
        """`logits [B, width]` raw, of the rows still drafting, from which draft token `step` (0, 1, …) was taken."""
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
    def sequence(self) -> Sequence:
        return self.request.sequence

    @property
    def slot(self) -> int:
        return self.sequence.held_slot


class DraftModel:
    """Drafts with `model`; its cache uses the slots of the target's, and is read up lazily, row by row.

    A row whose draft logits are no numbers gets what was drafted before, and no more speculation.
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
        packs: PackedLinears | None = None,
        recorder: Recorder | None = None,
        attend: Attend = masked_attention,
    ) -> None:
        self.runner = ModelRunner(model, slots, max_len, packs, recorder, attend)
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

    def propose(self, requests: Seq[ProposalRequest]) -> list[TokenTree]:
        rows = [_Row(request) for request in requests if request.sequence.draft_ok and request.sequence.uses_draft]
        rows.sort(key=lambda row: row.slot)  # rows in slot order read the cache without copies
        rows = self._read_long_texts(rows)
        if rows and self._can_draft_at_once(rows):
            self._draft_at_once(rows)
        else:
            self._draft_one_by_one(rows)
        trees = {row.sequence.id: self._tree(row) for row in rows}
        return [trees.get(request.sequence.id, EMPTY) for request in requests]

    def prospect(self, sequence: Sequence) -> Prospect:
        """Nothing for sequences that it is not to read."""
        return Prospect() if sequence.uses_draft else Prospect(0)

    def committed(self, sequence: Sequence, tree: TokenTree, path: Seq[int]) -> None:
        # The last drafted token was never read, so after full acceptance two tokens are unread.
        drafted = self._drafted.pop(sequence.id, None)
        if drafted is not None:
            sequence.draft_computed += min(len(path), max(drafted - 1, 0))

    def move(self, moves: Seq[Move]) -> None:
        self.runner.move(moves)

    def release(self) -> None:
        """See `ModelRunner.release`."""
        self.runner.release()
        self.loop.release()

    def forget(self, sequence_id: str) -> None:
        self._drafted.pop(sequence_id, None)

    def distrust(self, sequence: Sequence) -> None:
        """See `KeepsCache`. NaN left in a slot would reach whoever reads there next."""
        self.runner.cache.clear(sequence.held_slot)
        sequence.draft_computed, sequence.draft_unchecked = 0, False

    def _read_long_texts(self, rows: Seq[_Row]) -> list[_Row]:
        """Read on in rows that are far behind (new, swapped, long without speculation); the rows that can draft now.

        Only so much a step, in slot order: rows still behind wait, and the target's decoding does not wait for them.
        """
        room, ready, inputs = MOST, [], []
        for row in rows:
            tokens, start = row.sequence.tokens, row.sequence.draft_computed
            unread = len(tokens) - start
            if unread > ALONG and room > 0:
                end = start + min(unread - 1, room)  # the newest token is the first that is drafted from
                inputs.append(RowInput(row.slot, start, tokens[start:end], wanted=0))
                row.sequence.draft_computed = end
                row.sequence.draft_unchecked = len(tokens) - end > ALONG  # else it drafts in this step
                room -= end - start
            if len(tokens) - row.sequence.draft_computed <= ALONG:
                ready.append(row)
        if inputs:
            self.runner.read_uneven(inputs)
        return ready

    def _can_draft_at_once(self, rows: Seq[_Row]) -> bool:
        """Where passes are not free, rows that want fewer tokens than others are better left out of the later ones."""
        even = self.loop.records or len({row.request.length for row in rows}) == 1
        return even and self.rule is None and all(_needs_only_temperature(row.sequence) for row in rows)

    def _draft_at_once(self, rows: Seq[_Row]) -> None:
        """All tokens of all rows, and one look at the device."""
        count = max(row.request.length for row in rows)
        temperatures = [row.sequence.params.temperature for row in rows]
        draws = None
        if any(temperatures):
            scale = to_device(temperatures, self.runner.model.device, torch.float32)
            draws = Draws(scale, self.sampler.proposal_uniforms(len(rows), count, scale))
        drafts = self.loop.run([self._input(row) for row in rows], count, draws)
        probs = None if drafts.probs is None else drafts.probs.clone()  # the next replay writes over them
        seen = to_host(torch.cat([drafts.ids, drafts.finite], 1)).tolist()
        for r, (row, found) in enumerate(zip(rows, seen, strict=True)):
            sound = sum(found[count:])
            row.tokens = _until_stop(found[: min(sound, row.request.length)], row.sequence.stop_ids)
            if probs is not None and temperatures[r]:
                row.probs = probs[r, : len(row.tokens)]
            if sound < count:
                self._give_up(row)

    def _draft_one_by_one(self, rows: Seq[_Row]) -> None:
        """A token of every row at a time, for rows whose next token depends on what a look at the last one says."""
        for step in range(max((row.request.length for row in rows), default=0)):
            drafting = [row for row in rows if row.drafting]
            if not drafting:
                break
            self._draft_one(drafting, step)

    def _draft_one(self, rows: Seq[_Row], step: int) -> None:
        inputs = [self._input(row) for row in rows]
        logits = self.runner.logits(self.runner.read(inputs))
        places = [Place(row.sequence, tuple(row.tokens)) for row in rows]
        drafted = self.sampler.propose(logits, places, self.columns)
        goes_on = self.rule.keeps(logits, step) if self.rule is not None else [True] * len(rows)
        for row, token, probs, finite, keep in zip(
            rows, drafted.tokens, drafted.probs, drafted.finite, goes_on, strict=True
        ):
            if not finite:
                self._give_up(row)
                continue
            row.tokens.append(token)
            if probs is not None and isinstance(row.probs, list):
                row.probs.append(probs)
            full = len(row.tokens) >= row.request.length
            row.drafting = keep and not full and token not in row.sequence.stop_ids

    def _give_up(self, row: _Row) -> None:
        """The draft's logits are no numbers: this sequence is not drafted for any more."""
        row.drafting = row.sequence.draft_ok = False
        self.runner.cache.clear(row.slot)

    def _input(self, row: _Row) -> RowInput:
        """What the draft has not read: text first, then its own last token."""
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


def _needs_only_temperature(sequence: Sequence) -> bool:
    """Whether a token can be drawn on the device from nothing but its logits and a uniform number."""
    params = sequence.params
    filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    unseeded = params.seed is None and not filters
    return not needs_transform(sequence) and (params.policy.is_greedy or unseeded)


def _until_stop(tokens: Seq[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to and with the first stop token: nothing could stand after it."""
    end = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return list(tokens[:end])
