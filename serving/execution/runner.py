"""Model runner: one model over its slot cache, reading tokens of many rows at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy
import torch
from torch import Tensor
from torch.nn.functional import linear

from distillspec.models import LanguageModel
from distillspec.models.draft_steps import StatesBefore, Unread
from distillspec.models.fused_layers import FusedLayers
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.execution.background_call import BackgroundCall
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.fused_trial import faster, working
from distillspec.serving.execution.graphs import CudaRecorder, GraphedPasses, Recorder
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.recorded_shapes import RecordedShapes
from distillspec.serving.execution.row_input import RowInput
from distillspec.types import Ints, OutputHead


class Launches:
    """Runs the layers of one model as they are launched on a device, which can be recorded.

    Attributes:
        fused: the layers in few launches, None where they are not used.
    """

    def __init__(self, model: LanguageModel, fused: FusedLayers | None) -> None:
        self.model, self.fused = model, fused

    def __call__(self, batch: FlatBatch, fed: Tensor | None = None, **named: int) -> Tensor:
        """Return last states `[N, D]`. For the arguments see `FlatView.hidden`."""
        if self.fused is not None and self.fused.takes(batch.view):
            return self.fused.hidden(batch.view, batch.tokens)
        return batch.view.hidden(self.model, batch.tokens, fed, **named)


class ModelRunner:
    """Runs `model` on rows of its slot cache. Call inside `slot_attention_in(model.model)` and `inference_mode`.

    `passes` counts forward passes. The states `feature_ids` of all tokens are kept in `cache.features` (`FeatureTap`).
    """

    drafts_block = False  # True: `begin` computes all drafted positions, and `follow` runs nothing

    def __init__(
        self,
        model: LanguageModel,
        cache: SlotCache,
        prepared: PreparedModel | None = None,
        recorder: Recorder | None = None,
        feature_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.prepared = prepared
        self.cache = cache
        self.cache.state_ids = tuple(feature_ids)
        shapes = RecordedShapes.of_draft(cache)  # a target's are told to `GraphedPasses.record_ahead`
        fused = None if prepared is None else prepared.fused
        self.launches = Launches(model, None if fused is None else working(model, fused, cache))
        self.graphs = None
        if recorder is not None:
            self.graphs = GraphedPasses(self.launches, model.device, cache, recorder, shapes)
        self.passes = 0
        self._head: OutputHead | None = None  # made once: building it takes as long as a small product

    def record_ahead(self, speculation_length: int) -> None:
        """Record decoding passes before traffic, by the faster way to launch them. See `GraphedPasses.record_ahead`."""
        if self.graphs is None:
            return
        if (fused := self.launches.fused) is not None:
            self.launches.fused = faster(self.model, fused, self.cache, CudaRecorder())
        self.graphs.record_ahead(speculation_length)

    def read(self, rows: Sequence[RowInput]) -> Tensor:
        """Read all rows, windows and prompts alike, in one pass. Return last states `[Σ wanted, D]`, row by row."""
        BackgroundCall.give_way()  # or take the threads back, before any kind of pass
        if (native := self._native_of(rows)) is not None:
            return self._read_native(native, rows)
        batch = self.prepare(rows)
        hidden = self.hidden(batch)
        if batch.host is not None and batch.host.wants_all:
            return hidden
        return hidden.index_select(0, batch.wanted)

    def prepare(self, rows: Sequence[RowInput], count: int = 1) -> FlatBatch:
        """Return the input of one pass over `rows`. `count`: positions that it drafts, where it can."""
        return FlatBatch.of(self.cache, rows, self.model.device)

    def masks(self, count: int) -> int:
        """Return how many tokens stand behind each text in a pass that drafts `count` positions."""
        return 0

    @property
    def hands_states(self) -> bool:
        """True if `unread` can tell where the states are that the model reads."""
        return True

    def unread(self, rows: Sequence[RowInput], count: int) -> Unread:
        """Return chains on the CPU, for a call that reads them and drafts `count` positions (`DraftSteps`)."""
        shape = NativeRows.chains(*_numbers(rows))
        return Unread(_tokens(rows), shape, self.states_before(shape))

    def lacks_states(self, slot: int | None) -> bool:
        """Return True if the model reads states, and some of the slot's text are missing."""
        return False

    def states_before(self, rows: NativeRows) -> StatesBefore | None:
        """Return where the states are that the model reads beside these tokens, None if it reads tokens alone."""
        return None

    def hidden(self, batch: FlatBatch) -> Tensor:
        """Run one pass. Return last states `[N, D]` (`LanguageModel.last_states`), valid until the next call."""
        self.passes += 1
        if self.graphs is not None:
            return self.graphs.hidden(batch)
        return self._timed(batch)

    def _timed(self, batch: FlatBatch, states: Tensor | None = None, position: int = 0) -> Tensor:
        """Run a pass unrecorded. Its time counts towards compiling."""
        started = time.perf_counter()
        hidden = self.eager(batch, states, position)
        if self.prepared is not None and self.prepared.compiled is not None and self._native(batch) is None:
            self.prepared.compiled.spent(time.perf_counter() - started)
        return hidden

    def eager(self, batch: FlatBatch, states: Tensor | None = None, position: int = 0) -> Tensor:
        """Run one pass that nothing has recorded. Return last states `[N, D]`.

        Args:
            states: last states `[N, D]` of the tokens before, where the pass goes on behind them. For drafts that read
                states.
            position: number of the drafted position, for them too.
        """
        return self.layers(batch)

    def layers(self, batch: FlatBatch, fed: Tensor | None = None, **named: int) -> Tensor:
        """Run the model's layers as they serve this pass best. For the arguments see `FlatView.hidden`."""
        if (native := self._native(batch)) is not None:
            return native.hidden(batch.view, batch.tokens, fed)
        return self.launches(batch, fed, **named)

    def _native(self, batch: FlatBatch) -> NativeLayers | None:
        """Return the layers in one call of C++, if they take this pass."""
        native = None if self.prepared is None else self.prepared.native
        return native if native is not None and native.takes(batch.view) else None

    def _native_of(self, rows: Sequence[RowInput]) -> NativeLayers | None:
        """Return the same for rows that need no view of the cache: those of a model that reads tokens alone."""
        native = None if self.prepared is None or self.model.state_input is not None else self.prepared.native
        if native is None:
            return None
        widest = max((len(row.tokens) for row in rows if row.is_wide), default=0)
        return native if native.takes_rows(self.cache, [len(row.tokens) for row in rows], widest) else None

    def _read_native(self, native: NativeLayers, rows: Sequence[RowInput]) -> Tensor:
        self.passes += 1
        tokens = torch.from_numpy(_tokens(rows))
        parts = list(NativeRows.slices(native.most, [row.parents for row in rows], *_numbers(rows)))
        slices = tokens.split([part.total for part in parts])
        read = [native.hidden_of(self.cache, part, ids[None]) for part, ids in zip(parts, slices, strict=True)]
        hidden = torch.cat(read) if len(read) > 1 else read[0]
        if all(row.wanted == len(row.tokens) for row in rows):
            return hidden
        ends = accumulate(len(row.tokens) for row in rows)
        return hidden[[index for end, row in zip(ends, rows, strict=True) for index in range(end - row.wanted, end)]]

    def begin(self, batch: FlatBatch, count: int, *, recording: bool = False) -> Tensor:
        """Read the rows of a draft, for `count` drafted positions. Return what `follow` and `logits` carry on.

        It is `[rows, …]`, one entry a row. What it holds depends on the kind of runner: a last state `[rows, D]` here.

        Args:
            recording: run the pass as it is, for a recorder around it.
        """
        return (self.eager(batch) if recording else self.hidden(batch))[batch.wanted]

    def follow(self, batch: FlatBatch, carried: Tensor, position: int, *, recording: bool = False) -> Tensor:
        """Go on to drafted position `position` (the first is 0) behind one more token a row. Return what to carry on.

        Args:
            carried: `[rows, …]` of the position before.
        """
        return self.eager(batch) if recording else self.hidden(batch)

    def logits(self, carried: Tensor, position: int = 0, newest: Tensor | None = None) -> Tensor:
        """Return logits `[n, width]` in the model's dtype, columns as in `model.kept_ids`.

        Args:
            carried: `[n, …]` of a drafted position, or last states `[n, D]`.
            newest: `[n]` int64 the newest token of each row, for kinds whose head reads it.
        """
        packs = None if self.prepared is None else self.prepared.packs
        read = self.model.head_input(carried, position, newest)
        self._head = self._head or self.model.head
        return self._head.logits(read, linear if packs is None else packs.linear)

    def predicted_acceptance(self, carried: Tensor) -> Tensor | None:
        """Return the probabilities `[rows, positions]` that drafted tokens are accepted, None if none are predicted."""
        return None

    def keep_states(self, feature_ids: Sequence[int]) -> None:
        """Keep other states of the tokens of later passes. Recorded passes are recorded again."""
        self.cache.features, self.cache.state_ids = None, tuple(feature_ids)
        self.cache.lacking.clear()
        if self.graphs is not None:
            self.graphs = self.graphs.anew()

    def release(self) -> None:
        """Free the cache and recorded passes. Nothing can be read afterwards."""
        self.cache.release()
        self.graphs, self.launches.fused = None, None


def _tokens(rows: Sequence[RowInput]) -> Ints:
    return numpy.array([token for row in rows for token in row.tokens], dtype=numpy.int64)


def _numbers(rows: Sequence[RowInput]) -> Iterator[tuple[int, ...]]:
    """Slots, starts and numbers of tokens."""
    return zip(*((row.slot, row.start, len(row.tokens)) for row in rows), strict=True)
