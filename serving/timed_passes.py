"""Passes of target and draft to be timed: by `distill profile`, and by an engine that starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from distillspec.models import LanguageModel
from distillspec.serving.base.ladder import UNRECORDED, Recorded
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.rows import ANY, ANYTHING, Option
from distillspec.serving.base.shape import chain_of
from distillspec.serving.base.tree import DRAFT, TokenTree
from distillspec.serving.costs.fitted import Timed
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.base import HasMembers, ProposalRequest, Proposer, caches_of, readers
from distillspec.serving.proposers.by_name import draft_models
from distillspec.serving.proposers.draft_model import DraftModel

TOKEN = 5  # any token costs the same


@dataclass(frozen=True)
class Work:
    """One pass, or one draft loop, to time."""

    kind: str
    point: Timed  # without its seconds
    run: Callable[[], object]
    cached: tuple[int, int] = (0, 0)  # rows, and tokens of each that are in the cache before
    plain: int | None = None  # its plain pass is this many works earlier, None without one
    source: str = ""  # the draft, "" for the target


@dataclass(frozen=True)
class TimedPasses:
    """Makes works of an idle engine. Its slots must hold `context + length + 1` tokens.

    `recorded`: numbers of tokens that its passes are recorded in. Points have the tokens that passes compute.
    """

    target: LanguageModel
    runner: ModelRunner
    sampler: TokenSampler
    proposer: Proposer | None
    clock: Callable[[], float] = time.perf_counter
    recorded: Recorded = UNRECORDED

    def verification(self, rows: int, length: int, context: int, plain: int | None = None) -> Work:
        """Return a pass of the target over newest and drafted tokens, up to the verdicts, as in a step."""
        sequences, tree = _sequences(rows, context), TokenTree.chain([TOKEN] * length)
        windows = [VerificationWindow(sequence, tree) for sequence in sequences]
        inputs = [RowInput(s.held_slot, context - 1, [TOKEN] * (1 + length), 1 + length, tree) for s in sequences]

        def run() -> object:
            logits = self.target.full_width(self.runner.logits(self.runner.read(inputs)))
            return self.sampler.verify(logits, windows)

        tokens = self.recorded.target.up(rows * (1 + length))
        return Work("verification", Timed(rows * context, tokens, 1, 0.0, rows), run, (rows, context), plain)

    def prefill(self, longest: int, rounds: int) -> Work:
        """Return a pass of the target over a prompt.

        Every pass is one token shorter than the one before: real prompts rarely repeat a length, so that libraries'
        caches by shape do not help.
        """
        lengths: Iterator[int] = count(longest, -1)

        def run() -> object:
            inputs = [RowInput(0, 0, [TOKEN] * max(1, next(lengths)))]
            return self.runner.logits(self.runner.read(inputs)).argmax(-1).tolist()

        tokens = max(1.0, longest - (rounds + 1) / 2)  # mean over the rounds that count
        return Work("prefill", Timed(0, tokens, 1, 0.0, 1), run)

    def drafts(self) -> list[Option]:
        """Return what each draft may propose for a row with some text."""
        (sequence,) = _sequences(1, 1)
        foreseen = None if self.proposer is None else self.proposer.foreseen(sequence)
        return [option for option in (ANYTHING if foreseen is None else foreseen) if option.drafted_by_model]

    def drafting(self, rows: int, length: int, context: int, source: str = DRAFT) -> Work:
        """Return a whole draft loop for greedy requests: one pass a depth, or a single one for a block.

        Texts are no longer than the draft reads.
        """
        proposer = self.proposer
        assert proposer is not None
        context = max(1, min(context, self._longest(source) - length + 1))
        requests = [ProposalRequest(sequence, chain_of(length, source)) for sequence in _sequences(rows, context)]

        def run() -> object:
            for reader in readers(proposer):
                for request in requests:
                    reader.assume_read(request.sequence, context - 1)
            trees = proposer.propose(requests)
            for request in requests:
                proposer.leave_slot(request.sequence)
            return trees

        passes = 1 if any(option.drafts_block for option in self.drafts() if option.source == source) else length
        tokens = passes * self.recorded.drafts.up(rows * length // passes)
        point = Timed(rows * context * passes, tokens, passes, 0.0, rows * passes)
        return Work("drafting", point, run, (rows, context), source=source)

    def _longest(self, source: str) -> int:
        """Return the most tokens of a text that a draft reads."""
        members = self.proposer.proposers if isinstance(self.proposer, HasMembers) else {source: self.proposer}
        draft = members.get(source)
        return draft.longest_text if isinstance(draft, DraftModel) else ANY

    def warm_up(self, works: Sequence[Work]) -> None:
        """Make each model's cache, and take the memory of all contexts: pages never written would be read faster."""
        for first in {work.source: work for work in reversed(works)}.values():
            self.seconds(first)
        for rows, context in {work.cached for work in works}:
            self.commit(rows, context)

    def commit(self, rows: int, context: int) -> None:
        """Take the memory of `context` tokens in the first `rows` slots of all caches."""
        for cache in (self.runner.cache, *caches_of(self.proposer)):
            cache.commit(rows, context)

    def seconds(self, work: Work) -> float:
        """Return the seconds that a work takes, synchronised with the device before and after."""
        self._synchronise()
        started = self.clock()
        work.run()
        self._synchronise()
        return self.clock() - started

    def _synchronise(self) -> None:
        if self.target.device.type == "cuda":
            models = [self.target, *(draft.runner.model for draft in draft_models(self.proposer))]
            for device in {model.device for model in models}:
                torch.cuda.synchronize(device)


def _sequences(rows: int, context: int) -> list[SequenceState]:
    """Return greedy sequences with `context` tokens of text, in the first slots."""
    request = Request("profile", (TOKEN,) * context, SamplingParams(temperature=0.0), log=False)
    return [
        SequenceState(f"profile/{slot}", request, slot, slot, [TOKEN] * context, frozenset(), 1 << 20, slot=slot)
        for slot in range(rows)
    ]
