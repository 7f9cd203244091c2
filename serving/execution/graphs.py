"""Forward passes recorded once per shape and replayed: CUDA graphs, or compiled code on CPUs.

A pass over B rows of q tokens reads its inputs from buffers of its shape (graphs: of the next larger bucket). Rows and
tokens that only pad write to the cache's spare place and read what they like; their outputs are dropped.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from distillspec.errors import in_one_line
from distillspec.models import LanguageModel
from distillspec.models.numerics import power_of_two
from distillspec.models.slot_cache import SlotCache, SlotView

log = logging.getLogger(__name__)

WARM_UPS = 2
WIDEST = 16  # tokens a row. Longer reads are prompts and are not recorded
SHORTEST_REACH = 256  # keys read a row are rounded up to a power of two from here on

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

Output = TypeVar("Output")
Recording = TypeVar("Recording")


class Recorder(Protocol):
    """Turns a computation into one that can be replayed on changed inputs."""

    pads: bool  # whether shapes are rounded up to powers of two, because padding costs less than another recording
    after_s: float  # seconds to have spent in a shape before recording it is worth its price
    most: int  # shapes to record at most

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """Record `run`, calling it as often as needed. Return a replay, which gives its output for new input values."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool. An output is valid until the next replay."""

    pads = True
    after_s = 0.0
    most = 256

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may load a draft meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()

        def replay() -> Output:
            graph.replay()
            return output

        return replay


class CompiledRecorder:
    """`torch.compile` for CPUs: fuses what lies between the matrix products. A minute a shape the first time, seconds
    when the compiler's cache on disk knows it, so only shapes that are used a lot are worth it.

    The cache is `TORCHINDUCTOR_CACHE_DIR` where that is set, else a folder that, unlike torch's own choice, is still
    there after the machine was restarted.
    """

    pads = False
    most = 16

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        os.environ.setdefault(CACHE_VARIABLE, str(_cache_home() / "distillspec" / "compiled"))

    @staticmethod
    def works() -> bool:
        """Return True if there is a C++ compiler."""
        return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        started = time.perf_counter()
        compiled = torch.compile(run, fullgraph=True, dynamic=False)
        # Shapes are closures of one function, which dynamo would stop compiling after eight.
        with torch._dynamo.config.patch(recompile_limit=4 * self.most):
            compiled()
        log.info("compiled a pass in %.0f s", time.perf_counter() - started)
        return compiled


class Recordings(Generic[Recording]):
    """Recordings by shape: hot shapes are recorded, until one fails or there are enough."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._made: dict[Hashable, Recording] = {}
        self._spent_s: dict[Hashable, float] = {}
        self._works = True

    def __len__(self) -> int:
        return len(self._made)

    def get(self, shape: Hashable, record: Callable[[], Recording]) -> Recording | None:
        """Return the recording of a shape, made now if it is hot. None: run it unrecorded."""
        if shape in self._made:
            return self._made[shape]
        hot = self._spent_s.get(shape, 0.0) >= self.recorder.after_s
        if not (hot and self._works and len(self._made) < self.recorder.most):
            return None
        try:
            self._made[shape] = record()
        except Exception as error:  # a compiler has many ways to fail, and serving must go on
            self._works = False
            log.warning("passes run as they are: recording one failed (%s)", in_one_line(error, 300))
            return None
        return self._made[shape]

    @contextmanager
    def timed(self, shape: Hashable) -> Iterator[None]:
        """Count the time of a pass that runs as it is: it makes its shape hot."""
        started = time.perf_counter()
        yield
        self._spent_s[shape] = self._spent_s.get(shape, 0.0) + time.perf_counter() - started


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
    replay: Callable[[], Tensor]


class GraphedPasses:
    """Recorded passes of one model over slots 0 … B−1 of its cache. Other passes and cold shapes are not recorded."""

    def __init__(self, model: LanguageModel, cache: SlotCache, recorder: Recorder) -> None:
        self.model, self.cache, self.recorder = model, cache, recorder
        self._recordings: Recordings[_Recorded] = Recordings(recorder)

    @property
    def shapes(self) -> int:
        """Number of recorded shapes."""
        return len(self._recordings)

    def hidden(self, tokens: Tensor, view: SlotView) -> Tensor:
        """Final hidden states `[B, q, D]` of `tokens [B, q]` int64, valid until the next call."""
        shape = self._shape(view)
        if shape is None:
            return self.model.hidden(tokens, view.positions, slot_view=view)
        recorded = self._recordings.get(shape, lambda: self._record(shape))
        if recorded is None:
            with self._recordings.timed(shape):
                return self.model.hidden(tokens, view.positions, slot_view=view)
        rows, width = tokens.shape
        recorded.places.fill_(self.cache.max_len)
        recorded.tokens[:rows, :width].copy_(tokens)
        recorded.places[:rows, :width].copy_(view.places)
        return recorded.replay()[:rows, :width]

    def _shape(self, view: SlotView) -> _Shape | None:
        """Return the shape to replay, None for trees, prompts, and rows that are not the first slots."""
        rows, width = view.places.shape
        if view.first != 0 or view.ancestors is not None or width > WIDEST:
            return None
        if self.recorder.pads:
            rows, width = min(power_of_two(rows), self.cache.slots), power_of_two(width)
        return _Shape(rows, width, recorded_reach(view.reach, self.cache))

    def _record(self, shape: _Shape) -> _Recorded:
        device = self.model.device
        tokens = torch.zeros(shape.rows, shape.width, dtype=torch.int64, device=device)
        places = torch.full_like(tokens, self.cache.max_len)
        slots = torch.arange(shape.rows, device=device)
        reach, last = shape.reach, self.cache.max_len - 1

        def run() -> Tensor:
            positions = places.clamp(max=last)
            view = SlotView(self.cache, places, positions, reach, slots, first=0)
            return self.model.hidden(tokens, positions, slot_view=view)

        return _Recorded(tokens, places, self.recorder.record(run))


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def recorded_reach(reach: int, cache: SlotCache) -> int:
    """Keys read a row in recorded passes that have to read `reach`."""
    return min(max(power_of_two(reach), SHORTEST_REACH), cache.max_len)
