"""Forward passes recorded once per shape and replayed: CUDA graphs.

A pass over N tokens reads its inputs from buffers of the next larger shape. Rows and tokens that only pad write to the
cache's spare place and read what they like. Their outputs are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from distillspec.errors import in_one_line
from distillspec.models import LanguageModel
from distillspec.models.flat_view import FlatView, RowGroup
from distillspec.models.numerics import power_of_two
from distillspec.models.slot_cache import SlotCache, SlotView

log = logging.getLogger(__name__)

WARM_UPS = 2
WIDEST = 16  # tokens a row. Longer reads are prompts and are not recorded
SHORTEST_REACH = 256  # keys read a row are rounded up to a power of two from here on

Output = TypeVar("Output")
Recording = TypeVar("Recording")


class Recorder(Protocol):
    """Turns a computation into one that can be replayed on changed inputs."""

    most: int  # shapes to record at most

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """Record `run`, calling it as often as needed. Return a replay, which gives its output for new input values."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool. An output is valid until the next replay."""

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


class Recordings(Generic[Recording]):
    """Recordings by shape, until one fails or there are enough."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._made: dict[Hashable, Recording] = {}
        self._works = True

    def __len__(self) -> int:
        return len(self._made)

    def clear(self) -> None:
        """Drop what was recorded: tensors that it reads lie elsewhere."""
        self._made.clear()

    def get(self, shape: Hashable, record: Callable[[], Recording]) -> Recording | None:
        """Return the recording of a shape, made now if there is none. None: run it unrecorded."""
        if shape in self._made:
            return self._made[shape]
        if not (self._works and len(self._made) < self.recorder.most):
            return None
        try:
            self._made[shape] = record()
        except Exception as error:  # recording has many ways to fail, and serving must go on
            self._works = False
            log.warning("passes run as they are: recording one failed (%s)", in_one_line(error, 300))
            return None
        return self._made[shape]


@dataclass(frozen=True)
class PassShape:
    """Tokens of a pass, and of its attention: rows, tokens a row, keys read a row. Powers of two."""

    tokens: int
    rows: int
    width: int
    reach: int

    @classmethod
    def of(cls, view: FlatView, reach: int) -> PassShape | None:
        """Return the shape to record for a pass that reads `reach` keys a row, None for one that is not recorded.

        Trees and prompts are not. The rows are those of all slots up to the last one that the pass reads.
        """
        last, width, tokens = 0, 0, 0
        for group in view.groups:
            rows, own = group.view.places.shape
            if group.view.first is None or group.view.ancestors is not None or own > WIDEST:
                return None
            last, width, tokens = max(last, group.view.first + rows), max(width, own), tokens + group.count
        rows = min(power_of_two(last), view.cache.slots)
        return cls(power_of_two(tokens), rows, power_of_two(width), recorded_reach(reach, view.cache))


class PassInputs:
    """Input buffers of recorded passes of one shape. What only pads writes to the cache's spare place."""

    def __init__(self, cache: SlotCache, shape: PassShape, device: torch.device) -> None:
        self.cache, self.shape = cache, shape
        self.tokens = torch.zeros(1, shape.tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros_like(self.tokens[0])
        self._places = torch.full_like(self._slots, cache.max_len)
        self._back = torch.zeros_like(self._slots)
        self._queries = torch.zeros(shape.rows, shape.width, dtype=torch.int64, device=device)
        self._rectangle = torch.full_like(self._queries, cache.max_len)
        self._rows = torch.arange(shape.rows, device=device)

    def view(self) -> FlatView:
        """Return the view of a pass over the buffers. Make it inside the recording."""
        last, shape = self.cache.max_len - 1, self.shape
        positions, rectangle = self._places.clamp(max=last), self._rectangle
        rows = SlotView(self.cache, rectangle, rectangle.clamp(max=last), shape.reach, self._rows, first=0)
        group = RowGroup(rows, 0, shape.tokens, self._queries.view(-1), self._back)
        return FlatView(self.cache, self._slots, self._places, positions[None], (group,))

    def load(self, tokens: Tensor, view: FlatView) -> int:
        """Copy the input of a pass into the buffers. Return its number of tokens."""
        count = tokens.shape[1]
        self.tokens[:, :count].copy_(tokens)
        self._slots[:count].copy_(view.slots)
        self._places.fill_(self.cache.max_len)
        self._places[:count].copy_(view.places)
        self._rectangle.fill_(self.cache.max_len)
        self._queries.zero_()
        self._back.zero_()
        for group in view.groups:
            self._load_group(group)
        return count

    def _load_group(self, group: RowGroup) -> None:
        """Copy a group into the rows of its slots."""
        (rows, width), first = group.view.places.shape, group.view.first or 0
        order = torch.arange(group.count, device=self.tokens.device)
        queries, back = (order, order) if group.queries is None or group.back is None else (group.queries, group.back)
        own, tokens = slice(first, first + rows), slice(group.start, group.start + group.count)
        self._rectangle[own, :width].copy_(group.view.places)
        self._queries[own, :width].copy_(queries.view(rows, width) + group.start)
        self._back[tokens].copy_((back // width + first) * self.shape.width + back % width)


@dataclass(frozen=True)
class _Recorded:
    inputs: PassInputs
    replay: Callable[[], Tensor]


class GraphedPasses:
    """Recorded passes of one model over its cache. Prompts and trees are not recorded."""

    def __init__(self, model: LanguageModel, cache: SlotCache, recorder: Recorder) -> None:
        self.model, self.cache, self.recorder = model, cache, recorder
        self._recordings: Recordings[_Recorded] = Recordings(recorder)

    @property
    def shapes(self) -> int:
        """Number of recorded shapes."""
        return len(self._recordings)

    def record_ahead(self, speculation_length: int) -> None:
        """Record decoding passes before traffic: every batch size, up to `speculation_length` drafted tokens a row.

        Longer contexts and ragged windows are recorded when they come.
        """
        slots, reach = self.cache.slots, recorded_reach(1, self.cache)
        widths = sorted({power_of_two(1 + length) for length in range(min(speculation_length, WIDEST - 1) + 1)})
        for rows in sorted({min(power_of_two(rows), slots) for rows in range(1, slots + 1)}):
            for width in widths:
                shape = PassShape(power_of_two(rows * width), rows, width, reach)
                self._recordings.get(shape, partial(self._record, shape))

    def hidden(self, tokens: Tensor, view: FlatView) -> Tensor:
        """Final hidden states `[N, D]` of `tokens [1, N]` int64, valid until the next call."""
        shape = PassShape.of(view, max(group.view.reach for group in view.groups))
        recorded = None if shape is None else self._recordings.get(shape, lambda: self._record(shape))
        if recorded is None:
            return view.hidden(self.model, tokens)
        count = recorded.inputs.load(tokens, view)
        return recorded.replay()[:count]

    def _record(self, shape: PassShape) -> _Recorded:
        inputs = PassInputs(self.cache, shape, self.model.device)

        return _Recorded(inputs, self.recorder.record(lambda: inputs.view().hidden(self.model, inputs.tokens)))


def recorded_reach(reach: int, cache: SlotCache) -> int:
    """Keys read a row in recorded passes that have to read `reach`."""
    return min(max(power_of_two(reach), SHORTEST_REACH), cache.max_len)
