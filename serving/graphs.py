"""Forward passes recorded once per shape and replayed: CUDA graphs behind a seam that any machine can test.

A pass over B rows of q tokens reads its inputs from buffers of the next larger shape bucket. Rows and tokens that
only pad write to the cache's spare place and read what they like; their outputs are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache, SlotView

WARM_UPS = 2
WIDEST = 16  # tokens a row; longer reads are prompts, and run as they are

Replay = Callable[[], Tensor]


class Recorder(Protocol):
    """Turns a computation into one that can be replayed on changed inputs."""

    def record(self, run: Callable[[], Tensor]) -> Replay:
        """Run `run` as often as it takes to record it; the replay gives its output, in place, for new input values."""
        ...


class CudaRecorder:
    """CUDA graphs; all of them share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True)
class _Shape:
    """Rows, tokens a row, keys read a row."""

    rows: int
    width: int
    reach: int


@dataclass(frozen=True)
class _Recorded:
    tokens: Tensor  # [rows, width] int64
    places: Tensor  # [rows, width] int64
    replay: Replay


class GraphedPasses:
    """Recorded passes of one model over slots 0 … B−1 of its cache, made when a shape first occurs."""

    def __init__(self, model: LanguageModel, cache: SlotCache, recorder: Recorder) -> None:
        self.model, self.cache, self.recorder = model, cache, recorder
        self._recorded: dict[_Shape, _Recorded] = {}

    @property
    def shapes(self) -> int:
        """How many shapes have been recorded."""
        return len(self._recorded)

    def takes(self, view: SlotView) -> bool:
        """Whether a pass can be replayed: chains of few tokens in the first slots."""
        return view.first == 0 and view.ancestors is None and view.places.shape[1] <= WIDEST

    def hidden(self, tokens: Tensor, view: SlotView) -> Tensor:
        """Final hidden states `[B, q, D]` of `tokens [B, q]` int64, valid until the next call."""
        rows, width = tokens.shape
        shape = _Shape(min(_bucket(rows), self.cache.slots), _bucket(width), view.reach)
        if shape not in self._recorded:
            self._recorded[shape] = self._record(shape)
        recorded = self._recorded[shape]
        recorded.places.fill_(self.cache.max_len)
        recorded.tokens[:rows, :width].copy_(tokens)
        recorded.places[:rows, :width].copy_(view.places)
        return recorded.replay()[:rows, :width]

    def _record(self, shape: _Shape) -> _Recorded:
        device = self.model.device
        tokens = torch.zeros(shape.rows, shape.width, dtype=torch.int64, device=device)
        places = torch.full_like(tokens, self.cache.max_len)
        slots = torch.arange(shape.rows, device=device)

        def run() -> Tensor:
            positions = places.clamp(max=self.cache.max_len - 1)
            view = SlotView(self.cache, places, positions, shape.reach, slots, first=0)
            return self.model.hidden(tokens, positions, slot_view=view)

        return _Recorded(tokens, places, self.recorder.record(run))


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
