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

from distillspec.models.numerics import power_of_two
from distillspec.models.slot_cache import SlotView
from distillspec.serving.base.transfer import to_device
from distillspec.serving.decoding.drafting import Draws, choose
from distillspec.serving.decoding.logits import Columns
from distillspec.serving.decoding.noise import hashed_ids
from distillspec.serving.execution.graphs import Recorder, Recordings, recorded_reach
from distillspec.serving.execution.runner import ModelRunner, RowInput

Pass = Callable[[Tensor, SlotView], Tensor]


class Drafts(NamedTuple):
    """Drafted tokens of B rows, on the device. Valid until the next loop."""

    ids: Tensor  # [B, count] int64, absolute
    finite: Tensor  # [B, count] bool: False from the first NaN of a row's logits on
    probs: Tensor | None  # [B, count, width] float32 that tokens were drawn from, None if all rows are greedy


class DraftLoop:
    """Runs the loop on a draft's runner, recorded as a whole where the recorder pads (CUDA), else pass by pass."""

    def __init__(self, runner: ModelRunner, columns: Columns, recorder: Recorder | None) -> None:
        self.runner, self.columns = runner, columns
        self.hashed = hashed_ids(columns.ids(torch.arange(columns.width, device=runner.model.device)))
        self._recordings: Recordings[_Recorded] | None = None
        if recorder is not None and recorder.pads:
            self._recordings = Recordings(recorder)

    @property
    def records(self) -> bool:
        """True if whole loops are recorded."""
        return self._recordings is not None

    def release(self) -> None:
        """Drop all recordings."""
        self._recordings = None

    @property
    def shapes(self) -> int:
        """Number of recorded loops."""
        return 0 if self._recordings is None else len(self._recordings)

    def run(self, rows: Sequence[RowInput], count: int, draws: Draws) -> Drafts:
        """Read `rows` (each wants its last token's logits) and draft `count` tokens after each."""
        tokens, view = self.runner.prepare(rows)
        last = to_device([len(row.tokens) - 1 for row in rows], tokens.device)
        reach = self.runner.cache.reach(max(row.start + len(row.tokens) for row in rows) + count)
        recorded = self._recorded(tokens, view, reach, count, draws)
        if recorded is None:
            return self._loop(self.runner.hidden, tokens, view, last, reach, count, draws)
        self.runner.passes += count
        return recorded.run(tokens, view.places, last, draws)

    def _recorded(self, tokens: Tensor, view: SlotView, reach: int, count: int, draws: Draws) -> _Recorded | None:
        if self._recordings is None or view.first != 0:
            return None
        cache = self.runner.cache
        rows, width = min(power_of_two(tokens.shape[0]), cache.slots), power_of_two(tokens.shape[1])
        shape = (rows, width, recorded_reach(reach, cache), count)
        return self._recordings.get((*shape, draws.kind), lambda: self._record(*shape, draws))

    def _record(self, rows: int, width: int, reach: int, count: int, like: Draws) -> _Recorded:
        model, cache = self.runner.model, self.runner.cache
        tokens = torch.zeros(rows, width, dtype=torch.int64, device=model.device)
        places = torch.full_like(tokens, cache.max_len)
        last = torch.zeros(rows, dtype=torch.int64, device=model.device)
        draws = Draws(*(None if part is None else part.new_zeros(rows, *part.shape[1:]) for part in like))
        slots = torch.arange(rows, device=model.device)

        def one_pass(tokens: Tensor, view: SlotView) -> Tensor:
            return model.hidden(tokens, view.positions, slot_view=view)

        def run() -> Drafts:
            view = SlotView(cache, places, places.clamp(max=cache.max_len - 1), reach, slots, first=0)
            return self._loop(one_pass, tokens, view, last, reach, count, draws)

        assert self._recordings is not None
        return _Recorded(tokens, places, last, draws, cache.max_len, self._recordings.recorder.record(run))

    def _loop(
        self,
        one_pass: Pass,
        tokens: Tensor,
        view: SlotView,
        last: Tensor,
        reach: int,
        count: int,
        draws: Draws,
    ) -> Drafts:
        cache, every = view.cache, torch.arange(len(last), device=last.device)
        end = view.places[every, last] + 1  # position of the first drafted token
        hidden = one_pass(tokens, view)[every, last]
        ids, finite, probs = [], [], []
        for step in range(count):
            logits = self.runner.logits(hidden).float()
            choice = choose(logits, draws, step, self.hashed)
            finite.append(choice.finite)
            ids.append(self.columns.ids(choice.columns))
            if choice.probs is not None:
                probs.append(choice.probs)
            if step + 1 < count:
                # Rows near the context's end write to the spare place, and their excess tokens are cut off afterwards.
                places = (end + step).clamp(max=cache.max_len)[:, None]
                at = SlotView(cache, places, places.clamp(max=cache.max_len - 1), reach, view.slots, view.first)
                hidden = one_pass(ids[-1][:, None], at)[:, 0]
        return Drafts(
            torch.stack(ids, 1),
            torch.stack(finite, 1).long().cumprod(1).bool(),
            torch.stack(probs, 1) if probs else None,
        )


@dataclass(frozen=True)
class _Recorded:
    """A recorded loop and the buffers it reads. Padding rows write to the cache's spare place."""

    tokens: Tensor  # [rows, width] int64
    places: Tensor  # [rows, width] int64
    last: Tensor  # [rows] int64
    draws: Draws
    spare: int
    replay: Callable[[], Drafts]

    def run(self, tokens: Tensor, places: Tensor, last: Tensor, draws: Draws) -> Drafts:
        rows, width = tokens.shape
        self.places.fill_(self.spare)
        self.tokens[:rows, :width].copy_(tokens)
        self.places[:rows, :width].copy_(places)
        self.last[:rows].copy_(last)
        for held, part in zip(self.draws, draws, strict=True):
            if held is not None and part is not None:
                held[:rows].copy_(part)
        ids, finite, probs = self.replay()
        return Drafts(ids[:rows], finite[:rows], None if probs is None else probs[:rows])
