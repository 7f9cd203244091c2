"""Draft model as proposer: chains of tokens, with siblings, from a small model with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANY, NOTHING, Option
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.transfer import between, on_device, to_host
from distillspec.serving.base.tree import DRAFT, DraftProbs, TokenTree
from distillspec.serving.decoding.logits import Columns, Place
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.draft_runner import draft_runner
from distillspec.serving.execution.graphs import Recorder
from distillspec.serving.execution.memory import longest_read
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.slot_pool import Prefix
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer
from distillspec.serving.proposers.call_drafting import CallDrafting
from distillspec.serving.proposers.continue_rule import ContinueRule, accepted_prefix
from distillspec.serving.proposers.draft_loop import DraftLoop, Drafts
from distillspec.serving.proposers.growth import PLANNED, DynamicGrowth, Growth, TreePolicy
from distillspec.serving.proposers.level_drafting import LevelDrafting
from distillspec.serving.proposers.read_texts import DraftState, ReadTexts


class DraftModel(Proposer):
    """Drafts with a model. Its cache has the target's slots, and rows do catch-up prefill when they draft next.

    A row whose draft logits are NaN gets the tokens drafted before, and no more speculation (`not_finite`).

    Args:
        rule: which rows draft on, token by token.
        least_acceptance: drop the first token, and all behind it, whose acceptance a draft's confidence head expects
            with at most this probability. Drawn tokens have no part in it, so verification stays exact.
        trees: what the trees of the next proposals are made of. May be set.
        sampler: on the target's device. The draft may lie on another one. It hands over what tokens were drawn from.
        on_own_stream: see `draft_runner`.
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
        least_acceptance: float = 0.0,
        trees: TreePolicy = PLANNED,
        prepared: PreparedModel | None = None,
        recorder: Recorder | None = None,
        on_own_stream: bool = False,
    ) -> None:
        self.reads_states, self.sampler = model.state_input is not None, sampler
        recorder = None if model.device != sampler.device else recorder
        self.runner = draft_runner(model, target_cache, sampler.device, prepared, recorder, on_own_stream=on_own_stream)
        kept_ids = None if model.kept_ids is None else model.kept_ids.to(model.device)
        self._judged_ids = None if kept_ids is None else between(kept_ids, sampler.device)
        self.columns = Columns(model.identity.vocab_size, kept_ids)
        self.loop = DraftLoop(self.runner, self.columns, recorder)
        self.levels = LevelDrafting(
            self.runner, sampler, self.columns, self.loop.hashed, rule=rule, least_acceptance=least_acceptance
        )
        self.in_one_call = CallDrafting(self.runner, sampler)
        self.trees = trees
        self.version, self.source = version, source
        self.texts = ReadTexts(self.runner)
        self.attends = model.attends
        self.most_levels = model.most_positions or ANY  # of a tree
        self.longest_text = longest_read(model, self.runner.cache.max_len)
        self.not_finite: set[str] = set()

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        with on_device(self.runner.model.device):
            return self._proposed(requests)

    def _proposed(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        self.not_finite.clear()
        rows = [self._row(request) for request in requests if self._reads(request.sequence)]
        rows = [row for row in rows if self._has_room(row)]
        rows.sort(key=lambda row: row.slot)  # rows in slot order read the cache without copies
        if self.attends:
            ready = self.texts.catch_up([row.sequence for row in rows])
            rows = [row for row in rows if row.sequence.id in ready]
        if not rows:
            return [EMPTY] * len(requests)
        plain, others = list[Growth](), rows
        if self._keeps_all_levels:
            others = []
            for row in rows:
                (plain if self.in_one_call.may_take(row) else others).append(row)
        trees = {**self._draft_trees(plain, plain=True), **self._draft_trees(others)}
        return [trees.get(request.sequence.id, EMPTY) for request in requests]

    def _draft_trees(self, rows: Sequence[Growth], *, plain: bool = False) -> dict[str, TokenTree]:
        """Draft the trees of some rows, in slot order, and return them by sequence. `plain`: maybe in one call."""
        if not rows:
            return {}
        texts = [self._unread(row) for row in rows]
        if plain and self.in_one_call.takes(rows, texts):
            probs, failed = self.in_one_call.draft(rows, texts, self.trees)
        elif self.can_draft_in_loop(rows):
            probs, failed = self._draft_in_loop(rows, texts)
        else:
            probs, failed = self.levels.draft(rows, texts, self.trees)
        table = None if probs is None else DraftProbs(between(probs, self.sampler.device), self._judged_ids)
        for row in failed:
            self._give_up(row)
        for row in rows:
            row.note_read()
            row.state.unchecked = False
        drawn_from = None if self.trees.most_probable else table
        return {row.sequence.id: row.tree(drawn_from if row.is_drawn else None, self.source) for row in rows}

    def state(self, sequence_id: str) -> DraftState:
        """Return what the draft knows of a sequence. Nothing yet, if it is new."""
        return self.texts.state(sequence_id)

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return an option of no tokens for sequences that the draft does not read, or that are beyond its context."""
        state, room = self.state(sequence.id), self.longest_text - len(sequence.tokens)
        if not self._reads(sequence):
            return NOTHING
        unread = len(sequence.tokens) - state.computed if self.attends else 1
        option = Option(
            min(self.most_levels, room + 1),
            unread_tokens=unread,
            source=self.source,
            drafts_block=self.runner.drafts_block,
            wide=True,
        )
        return (option,)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        """Keep what the cache holds of the accepted tokens, whoever proposed them.

        The last drafted token was never read, so after full acceptance two tokens are unread. A draft that reads states
        has read drafted tokens behind its own states, and reads them again behind the target's.
        """
        state = self.state(sequence.id)
        same = 0
        for drafted, node in zip(() if self.reads_states else state.drafted, path, strict=False):
            if drafted != tree.tokens[node]:
                break
            same += 1
        # The newest token is read before the next one is drafted, also where nothing new follows what was read.
        state.computed, state.drafted = min(state.computed + same, len(sequence.tokens) - 1), ()

    def release(self) -> None:
        self.runner.release()
        self.loop.release()

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """See `ReadTexts.enter_slot`."""
        self.texts.enter_slot(sequence, prefix)

    def leave_slot(self, sequence: SequenceState) -> None:
        """See `ReadTexts.leave_slot`."""
        self.texts.leave_slot(sequence)

    def read_on(self, texts: Sequence[tuple[SequenceState, int]]) -> None:
        """See `ReadTexts.catch_up`. Drafts that attend to nothing have nothing to read."""
        able = [(s, tokens) for s, tokens in texts if self._reads(s)]
        able.sort(key=lambda text: text[0].held_slot)
        if self.attends and able:
            with on_device(self.runner.model.device):
                self.texts.catch_up([sequence for sequence, _ in able], sum(tokens for _, tokens in able))

    def _reads(self, sequence: SequenceState) -> bool:
        state, lacking = self.state(sequence.id), self.runner.lacks_states(sequence.slot)
        return state.sound and not state.skipped and not lacking and len(sequence.tokens) <= self.longest_text

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

    def can_draft_in_loop(self, rows: Sequence[Growth]) -> bool:
        """Return True if one loop can draft all rows: chains, and siblings of their tokens.

        Where passes are not recorded, rows of unlike lengths are cheaper level by level: short ones leave early.
        """
        together = self.loop.records or self.runner.drafts_block or len({row.shape.depth for row in rows}) == 1
        given = any(row.guess or row.sequence.candidates for row in rows)
        return together and self._has_free_choice and not given and all(row.shape.is_spine for row in rows)

    @property
    def _has_free_choice(self) -> bool:
        """True if nothing has to look at each level before the next one is drafted."""
        return self.levels.rule is None and self.trees.width is None

    @property
    def _keeps_all_levels(self) -> bool:
        """True if nothing decides how far a row drafts while it drafts."""
        predicted = self.levels.least_acceptance > 0 and self.runner.model.has_confidence_head
        return self._has_free_choice and not predicted

    def _draft_in_loop(self, rows: Sequence[Growth], texts: Sequence[RowInput]) -> tuple[Tensor | None, list[Growth]]:
        """Draft all tokens of all rows with one device read. Returns what `LevelDrafting.draft` does."""
        widths = self._common_widths(rows)
        count, failed = len(widths), list[Growth]()
        places = [Place(row.sequence) for row in rows]
        device, best = self.runner.model.device, self.trees.most_probable
        draws = self.sampler.draws(places, count, self.columns, max(widths), best=best, device=device)
        drafts = self.loop.run(texts, widths, draws)
        seen = to_host(torch.cat([drafts.finite, self._accepted_prefix(drafts), drafts.ids], 1)).tolist()
        for r, (row, numbers) in enumerate(zip(rows, seen, strict=True)):
            sound, accepted = sum(numbers[:count]), sum(numbers[count : 2 * count])
            tokens = iter(numbers[2 * count :])
            levels = [list(islice(tokens, width)) for width in widths]
            for level in range(min(sound, accepted, row.shape.depth)):
                if row.frontier:
                    row.add([levels[level]], [r * count + level])
            if sound < count:
                failed.append(row)
        if drafts.probs is None:
            return None, failed
        probs = drafts.probs.clone() if self.loop.records else drafts.probs  # the next replay overwrites them
        return probs.flatten(0, 1), failed

    def _common_widths(self, rows: Sequence[Growth]) -> tuple[int, ...]:
        """Return widths that give every row its tokens. Recorded loops have one for all levels: few are recorded."""
        widths = tuple(map(max, zip_longest(*(row.shape.widths for row in rows), fillvalue=0)))
        return (max(widths),) * len(widths) if self.loop.records else widths

    def _accepted_prefix(self, drafts: Drafts) -> Tensor:
        """Return `[B, count]` bool: False from the first token on that the draft expects to be rejected."""
        if drafts.predicted is None or self.levels.least_acceptance == 0:
            return torch.ones_like(drafts.finite)
        return accepted_prefix(drafts.predicted, self.levels.least_acceptance)

    def _row(self, request: ProposalRequest) -> Growth:
        shape = request.trees[0].shape.shortened(self.most_levels)
        room = self.longest_text - len(request.sequence.tokens)
        while self._places(shape) > room:  # at the context's end
            shape = shape.shortened(shape.depth - 1)
        state = self.state(request.sequence.id)
        if self.trees.width is not None:
            return DynamicGrowth(request.sequence, state, shape, self.trees.width)
        # The last level's tokens are read by nobody.
        guess = request.guess[: shape.depth - 1] if shape.is_spine else ()
        return Growth(request.sequence, state, shape, guess=guess)

    def _places(self, shape: TreeShape) -> int:
        """Return the most places behind the text that the draft writes while it grows a tree."""
        below = max(0, shape.depth - 1)
        return sum(shape.reads[1:]) if self.trees.width is None else self.trees.width * below

    def _has_room(self, row: Growth) -> bool:
        """Return False at the context's end, where a block's masks have no place."""
        return not self.runner.drafts_block or len(row.sequence.tokens) + self.most_levels <= self.longest_text

    def _give_up(self, row: Growth) -> None:
        """End speculation for a row whose draft logits are NaN."""
        row.state.sound = False
        self.not_finite.add(row.sequence.id)
        row.sequence.failed_sources.add(self.source)
        self.runner.cache.clear(row.slot)

    def _unread(self, row: Growth) -> RowInput:
        """Return text that the draft has not read (the newest token, if it does not attend), and the row's guess."""
        sequence = row.sequence
        start = row.state.computed if self.attends else len(sequence.tokens) - 1
        row.state.computed = len(sequence.tokens)
        return RowInput(row.slot, start, [*sequence.tokens[start:], *row.guess], 1 + len(row.guess))
