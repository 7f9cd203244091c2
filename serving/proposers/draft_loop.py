"""Draft loop: many tokens a row without a device read. Each token is drawn on the device and fed to the next pass.

On CUDA the whole loop is one graph. Rows of all kinds share it (`decoding.drafting`).
Tokens past a stop, or beyond a row's length, are cut off afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.serving.decoding.drafting import Draws, choose
from distillspec.serving.decoding.logits import Columns
from distillspec.serving.decoding.noise import hashed_ids
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.graphs import Recorder, Recordings
from distillspec.serving.execution.host_batch import HostBatch
from distillspec.serving.execution.pass_inputs import PassInputs
from distillspec.serving.execution.recorded_shapes import PassShape, RecordedShapes
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner


class Drafts(NamedTuple):
    """Drafted tokens of B rows, on the device. Valid until the next loop."""

    ids: Tensor  # [B, Σ widths] int64, absolute: level by level, siblings in their order, −1 for none
    finite: Tensor  # [B, count] bool: False from the first NaN of a row's logits on
    probs: Tensor | None  # [B, count, width] float32 that tokens were drawn from, None if all rows are greedy
    predicted: Tensor | None = None  # [B, count] float32: probability of each being accepted, if the draft predicts it


class DraftLoop:
    """Runs the loop on a draft's runner, recorded as a whole on CUDA, else pass by pass."""

    def __init__(self, runner: ModelRunner, columns: Columns, recorder: Recorder | None) -> None:
        self.runner, self.columns = runner, columns
        self.hashed = hashed_ids(columns.ids(torch.arange(columns.width, device=runner.model.device)))
        self._recordings: Recordings[_Recorded] | None = None if recorder is None else Recordings(recorder)
        self._shapes = RecordedShapes.of_draft(runner.cache)

    @property
    def records(self) -> bool:
        """True if whole loops are recorded."""
        return self._recordings is not None

    def release(self) -> None:
        """Drop all recordings."""
        self._recordings = None

    def record_again(self) -> None:
        """Drop all recordings, and record further ones: the states that they read lie elsewhere."""
        if self._recordings is not None:
            self._recordings.clear()

    @property
    def shapes(self) -> int:
        """Number of recorded loops."""
        return 0 if self._recordings is None else len(self._recordings)

    def run(self, rows: Sequence[RowInput], widths: tuple[int, ...], draws: Draws) -> Drafts:
        """Read `rows` (each wants its last token's logits) and draft a chain after each, with siblings.

        Args:
            widths: tokens of each level. The chain goes on behind the first of them.
        """
        count = len(widths)
        batch = self.runner.prepare(rows, count)
        reach = self.runner.cache.reach(max(row.end for row in rows) + count)
        assert batch.host is not None
        recorded = self._recorded(batch.host, reach, widths, draws)
        if recorded is None:
            ends = batch.view.places[batch.wanted] + 1
            return self._loop(batch, ends, reach, widths, draws)
        self.runner.passes += 1 if self.runner.drafts_block else count
        return recorded.run(batch.host, draws)

    def _recorded(self, batch: HostBatch, reach: int, widths: tuple[int, ...], draws: Draws) -> _Recorded | None:
        if self._recordings is None:
            return None
        shape = self._shapes.shape(batch, reach)
        if shape is None:
            return None
        return self._recordings.get((shape, widths, draws.kind), lambda: self._record(shape, widths, draws))

    def _record(self, shape: PassShape, widths: tuple[int, ...], like: Draws) -> _Recorded:
        model, cache = self.runner.model, self.runner.cache
        inputs = PassInputs(cache, shape, model.device)
        draws = Draws(*(None if part is None else part.new_zeros(shape.rows, *part.shape[1:]) for part in like))

        def run() -> Drafts:
            return self._loop(inputs.batch(), inputs.ends, shape.reach, widths, draws, recording=True)

        assert self._recordings is not None
        return _Recorded(inputs, draws, self._recordings.recorder.record(run))

    def _loop(
        self,
        batch: FlatBatch,
        ends: Tensor,
        reach: int,
        widths: tuple[int, ...],
        draws: Draws,
        recording: bool = False,
    ) -> Drafts:
        """Draft `widths` tokens a row, the chain's first at place `ends [B]`."""
        count = len(widths)
        max_len, carried = batch.view.cache.max_len, self.runner.begin(batch, count, recording=recording)
        predicted = self.runner.predicted_acceptance(carried)
        newest = batch.tokens[0, batch.wanted]
        ids, finite, probs = [], [], []
        for step, width in enumerate(widths):
            logits = self.runner.logits(carried, step, newest).float()
            choice = choose(logits, draws, step, self.hashed, width)
            finite.append(choice.finite)
            ids.append(self.columns.ids(choice.columns))
            newest = ids[-1][:, 0]
            if choice.probs is not None:
                probs.append(choice.probs)
            if step + 1 < count and not self.runner.drafts_block:
                # Rows near the context's end write to the spare place, and their excess tokens are cut off afterwards.
                at = (ends + step).clamp(max=max_len)
                following = self._following(batch, at, newest, reach, step)
                carried = self.runner.follow(following, carried, step + 1, recording=recording)
        return Drafts(
            torch.cat(ids, 1),
            _so_far(torch.stack(finite, 1)),
            torch.stack(probs, 1) if probs else None,
            predicted,
        )

    def _following(self, batch: FlatBatch, at: Tensor, newest: Tensor, reach: int, step: int) -> FlatBatch:
        """Return the next pass: one more token in each row, `newest [B]` at places `at [B]`.

        Where passes are recorded one by one, the host tells them where the tokens go, and the device which they are.
        """
        if batch.host is None or self.runner.graphs is None:
            return FlatBatch.on_device(newest[None], batch.view.following(at, reach), batch.wanted)
        cache, ends = self.runner.cache, (batch.host.ends + step).clip(max=self.runner.cache.max_len).tolist()
        rows = [RowInput(row.slot, end, (0,)) for row, end in zip(batch.host.rows, ends, strict=True)]
        return FlatBatch(HostBatch(cache, rows), cache, self.runner.model.device, newest[None])


def _so_far(finite: Tensor) -> Tensor:
    """Return `[B, count]` bool: False from the first False of a row on."""
    return finite.long().cumprod(1).bool()


@dataclass(frozen=True)
class _Recorded:
    """A recorded loop and the buffers it reads."""

    inputs: PassInputs
    draws: Draws
    replay: Callable[[], Drafts]

    def run(self, batch: HostBatch, draws: Draws) -> Drafts:
        slots = self.inputs.load(batch)  # recorded rows are slots
        for buffer, part in zip(self.draws, draws, strict=True):
            if buffer is not None and part is not None:
                buffer[slots] = part
        ids, finite, *others = self.replay()
        return Drafts(ids[slots], finite[slots], *(None if part is None else part[slots] for part in others))
