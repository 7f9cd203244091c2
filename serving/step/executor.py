"""Executor: what runs a planned step. Models on a device (`ModelExecutor`), or a simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import BatchView, Option
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.sequences.slot_follower import SlotFollower
from distillspec.serving.step.micro_batches import split
from distillspec.serving.step.timer import StepTimer


@dataclass(frozen=True)
class StepWork:
    """A planned step: decoding sequences with what to draft for each, and prompts to read."""

    decoding: Sequence[SequenceState]
    chunks: Sequence[tuple[SequenceState, int]]  # sequences with unread text, and the tokens to read of each
    view: BatchView  # of the decoding sequences, in their order
    plan: Plan  # the same
    timer: StepTimer
    meanwhile: Callable[[], None]  # work for the host while the target's pass runs on a device of its own

    def split(self, count: int) -> list[StepWork]:
        """Split the rows into micro-batches. Prompts and what drafts read ahead are the last one's."""
        if count == 1:
            return [self]
        rows = zip(split(self.decoding, count), split(self.view.rows, count), split(self.plan.rows, count), strict=True)
        parts = [
            replace(
                self,
                decoding=decoding,
                chunks=(),
                view=replace(self.view, rows=tuple(view_rows), prefill_tokens=0),
                plan=replace(self.plan, rows=tuple(plan_rows), readings=()),
            )
            for decoding, view_rows, plan_rows in rows
        ]
        last = parts[-1]
        view = replace(last.view, prefill_tokens=self.view.prefill_tokens)
        plan = replace(last.plan, readings=self.plan.readings)
        return [*parts[:-1], replace(last, chunks=self.chunks, view=view, plan=plan)]


class Executor(SlotFollower, Protocol):
    """Drafts, verifies and commits. One thread calls it, inside `context`."""

    @property
    def overlaps(self) -> bool:
        """True if the host is idle while the target's pass runs: `run` calls `StepWork.meanwhile` then."""
        ...

    def attach(self, sequences: SequenceManager) -> None:
        """Take the sequences that steps work on. Called once."""
        ...

    def context(self) -> AbstractContextManager[object]:
        """Return the context that steps run in: the device."""
        ...

    def begin_step(self) -> None:
        """Count a step that has something to run."""
        ...

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        """Return what may be drafted for a sequence now, one option for each source, never none."""
        ...

    def most_nodes(self, depth: int) -> int:
        """Return the most nodes of a row's tree of `depth` levels."""
        ...

    def run(self, work: StepWork) -> tuple[RowResult, ...]:
        """Run a step, write its tokens into the sequences, and finish those that have ended.

        The timer gets the seconds of drafting and of the target.
        """
        ...

    def release(self) -> None:
        """Free caches and recordings. No step can follow."""
        ...
