"""Runs steps on models: propose, read, verify, commit."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.models.wiping import wipe
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANYTHING, NOTHING, Option
from distillspec.serving.base.transfer import on_device
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.verdict import Judgement
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.slot_pool import Drop, Move, Prefix
from distillspec.serving.proposers.base import EMPTY, HasMembers, ProposalRequest, Proposer, readers, versions_of
from distillspec.serving.proposers.guarded_proposer import GuardedProposer
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.step.commit import Committer
from distillspec.serving.step.draft_stream import DraftStream
from distillspec.serving.step.draft_thread import DraftThread
from distillspec.serving.step.executor import StepWork
from distillspec.serving.step.late_states import LateStates
from distillspec.serving.step.micro_batches import MicroBatches
from distillspec.serving.step.reading import read_step


class _Judged(NamedTuple):
    """A micro-batch with its verdicts. `logits [Σ (1 + nodes), V]` are those of its windows."""

    windows: list[VerificationWindow]
    judgements: list[Judgement]
    logits: Tensor


class ModelExecutor:
    """Drafts with a proposer, verifies with the target, and commits. See `Executor`.

    `proposer` may be replaced between steps, by `use_proposer`.

    Args:
        micro_batches: see `MicroBatches`. On a CPU with a single core there is one. On CUDA drafts of several run on a
            stream or a device of their own.
    """

    sequences: SequenceManager  # from `attach` on, as `committer`
    committer: Committer

    def __init__(
        self,
        target: LanguageModel,
        runner: ModelRunner,
        sampler: TokenSampler,
        proposer: Proposer | None,
        micro_batches: int = 1,
    ) -> None:
        self.target = target
        self.runner = runner
        self.sampler = sampler
        launches = target.device.type == "cuda"
        self._thread = DraftThread(computes=not launches)
        self._batches = MicroBatches(micro_batches if launches or self._thread.cores > 1 else 1)
        self._stream = DraftStream(target.device) if launches and micro_batches != 1 else None
        self._late = LateStates(runner)
        self._set(proposer)

    @property
    def overlaps(self) -> bool:
        return not self.sampler.reads_are_free

    @property
    def records(self) -> bool:
        """True if the target's passes are recorded."""
        return self.runner.graphs is not None and self.runner.graphs.works

    @torch.inference_mode()
    def record_ahead(self, speculation_length: int) -> None:
        """Record the target's passes of up to `speculation_length` drafted tokens a row, where passes are recorded."""
        with self.context():
            self.runner.record_ahead(speculation_length)

    def attach(self, sequences: SequenceManager) -> None:
        self.sequences = sequences
        self.committer = Committer(self.runner.cache, sequences)

    def context(self) -> AbstractContextManager[object]:
        return on_device(self.target.device)

    def use_proposer(self, proposer: Proposer | None) -> None:
        """Draft with another proposer from now on, None: draft nothing. All sequences may speculate again."""
        self._release_proposer()
        self._set(proposer)
        self.sequences.forgive_failures()

    def read_states_again(self) -> None:
        """Learn that the target keeps other states from now on. Those of texts in slots are read beside next steps."""
        self.sequences.forget_free()
        self._late.begin(self.sequences.running)

    def _set(self, proposer: Proposer | None) -> None:
        self.proposer = proposer
        self._guarded = GuardedProposer(proposer, "the proposer", versions_of(proposer))
        self._several: HasMembers | None = proposer if isinstance(proposer, HasMembers) else None
        self._readers = readers(proposer)

    def _release_proposer(self) -> None:
        if self.proposer is not None:
            self.proposer.release()

    def begin_step(self) -> None:
        self._guarded.step()
        if self.proposer is not None:
            self.proposer.begin_step()

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        return NOTHING if self.proposer is None else self._guarded.foreseen(sequence, ANYTHING)

    def most_nodes(self, depth: int) -> int:
        return depth if self.proposer is None else max(depth, self.proposer.most_nodes(depth))

    def run(self, work: StepWork) -> tuple[RowResult, ...]:
        self._read_late_states(work)
        drafting = sum([bool(row.trees) for row in work.plan.rows])
        parts = work.split(self._batches.count(drafting))
        with closing(self._drafted(parts)) as drafted:  # after an error too no draft runs on
            judged = [batch for part, trees in drafted if (batch := self._verify(part, trees)) is not None]
        if not judged:
            return ()
        windows = [window for part in judged for window in part.windows]
        judgements = [judgement for part in judged for judgement in part.judgements]
        logits = judged[0].logits if len(judged) == 1 else torch.cat([part.logits for part in judged])
        self._guarded.see(windows, logits)
        results = self.committer.commit(windows, judgements, logits, self._guarded, work.timer.now)
        if not work.chunks:  # prompts take time that is not the micro-batches'
            self._batches.observe(drafting, len(logits), work.timer.total_s)
        return results

    def _drafted(self, parts: Sequence[StepWork]) -> Generator[tuple[StepWork, list[TokenTree]]]:
        """Yield each micro-batch with its trees. A thread drafts those behind meanwhile, if there are several."""
        if len(parts) == 1:
            yield parts[0], self._draft(parts[0])
        elif self._stream is None:
            yield from self._thread.ahead(parts, self._draft)
        else:
            yield from self._stream.in_order(partial(self._thread.ahead, parts), self._draft)

    def _draft(self, work: StepWork) -> list[TokenTree]:
        with work.timer.timing("draft"):
            trees = self._propose(work)
            self._read_ahead(work)
        return trees

    def _verify(self, work: StepWork, trees: Sequence[TokenTree]) -> _Judged | None:
        """Read and judge a micro-batch. None: it has only prompts, which are not read whole yet."""
        windows = [VerificationWindow(sequence, tree) for sequence, tree in zip(work.decoding, trees, strict=True)]
        with work.timer.timing("target"):
            hidden, windows = read_step(self.runner, self.sequences, windows, work.chunks)
            if not windows:
                return None
            logits = self.target.full_width(self.runner.logits(hidden))
            if self.overlaps:
                work.meanwhile()
            # Reading the verdicts waits for the target.
            return _Judged(windows, self.sampler.verify(logits, windows), logits)

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        self._late.enter_slot(sequence, prefix)
        for reader in self._readers:
            reader.enter_slot(sequence, prefix)

    def leave_slot(self, sequence: SequenceState) -> None:
        self._guarded.leave_slot(sequence)

    def copy(self, moves: Sequence[Move]) -> None:
        for cache in self._caches() if moves else ():
            for move in moves:
                cache.copy(*move)

    def drop(self, drops: Sequence[Drop]) -> None:
        for cache in self._caches() if drops else ():
            for drop in drops:
                cache.drop(*drop)

    def clear(self, slot: int) -> None:
        self.runner.cache.clear(slot)

    def wipe(self, texts: Mapping[int, int]) -> None:
        for cache in self._caches():
            wipe(cache, texts)

    def release(self) -> None:
        self._thread.stop()
        self.runner.release()
        self._release_proposer()

    def _caches(self) -> list[SlotCache]:
        return [self.runner.cache, *(cache for reader in self._readers for cache in reader.caches)]

    def _read_late_states(self, work: StepWork) -> None:
        """Read texts again whose states are missing, where prompts leave room."""
        if self.runner.cache.lacking:
            prompts = sum(tokens for _, tokens in work.chunks)
            with work.timer.timing("readings"):
                self._late.read(self.sequences.running, self.sequences.limits.prefill_chunk, prompts)

    def _read_ahead(self, work: StepWork) -> None:
        """Let drafts read the texts of rows that will switch to them."""
        if not work.plan.readings or self._several is None:
            return
        unfinished = self.sequences.unfinished
        readings = [(read.source, unfinished[read.sequence_id], read.tokens) for read in work.plan.readings]
        with work.timer.timing("readings"):
            self._several.read_ahead(readings)

    def _propose(self, work: StepWork) -> list[TokenTree]:
        for reader in self._readers:
            for sequence, row in zip(work.decoding, work.plan.rows, strict=True):
                if not row.draft_prefill:
                    reader.skip(sequence)
        pairs = list(zip(work.decoding, work.plan.rows, strict=True))
        requests = [ProposalRequest(sequence, row.trees) for sequence, row in pairs if row.trees]
        if not requests or self.proposer is None:
            return [EMPTY] * len(pairs)
        if self._several is not None:
            self._several.clock = work.timer.clock
        proposals = self._guarded.propose(requests)
        if self._several is not None:
            work.timer.add_drafted(self._several.seconds)
        drafted = iter(proposals)
        trees = [next(drafted).shortened(row.verified_length) if row.trees else EMPTY for _, row in pairs]
        return [self._shortened_to_fit(sequence, tree) for sequence, tree in zip(work.decoding, trees, strict=True)]

    def _shortened_to_fit(self, sequence: SequenceState, tree: TokenTree) -> TokenTree:
        """Drop the deepest levels of a wide tree that has more nodes than reserved places."""
        while len(tree) and len(sequence.tokens) + len(tree) > self.sequences.pool.reserved[sequence.id]:
            tree = tree.shortened(tree.depth - 1)
        return tree
