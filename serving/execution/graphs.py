"""Forward passes recorded once per shape and replayed: CUDA graphs.

A pass over N tokens reads its inputs from buffers of the next larger shape (`recorded_shapes`). Rows and tokens
that only pad write to the cache's spare place and read what they like. Their outputs are dropped.
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
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.pass_inputs import PassInputs
from distillspec.serving.execution.recorded_shapes import PassShape, RecordedShapes

log = logging.getLogger(__name__)

WARM_UPS = 2
AHEAD = 0.5  # share of all recordings that may be made before traffic
LEAST_FREE = 1 << 28  # bytes of the device that stay free of recordings

Output = TypeVar("Output")
Recording = TypeVar("Recording")


class Recorder(Protocol):
    """Turns a computation into one that can be replayed on changed inputs."""

    most: int  # shapes to record at most

    @property
    def has_room(self) -> bool:
        """True if there is memory for another recording."""
        ...

    def record(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """Record `run`, calling it as often as needed. Return a replay, which gives its output for new input values."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool. An output is valid until the next replay."""

    most = 256

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def has_room(self) -> bool:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused > LEAST_FREE

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
        self.works = True

    def __len__(self) -> int:
        return len(self._made)

    def clear(self) -> None:
        """Drop what was recorded: tensors that it reads lie elsewhere."""
        self._made.clear()

    def get(self, shape: Hashable, record: Callable[[], Recording]) -> Recording | None:
        """Return the recording of a shape, made now if there is none. None: run it unrecorded."""
        if shape in self._made:
            return self._made[shape]
        if not (self.works and len(self._made) < self.recorder.most and self.recorder.has_room):
            return None
        try:
            self._made[shape] = record()
        except Exception as error:  # recording has many ways to fail, and serving must go on
            self.works = False
            log.warning("passes run as they are: recording one failed (%s)", in_one_line(error, 300))
            return None
        return self._made[shape]


@dataclass(frozen=True)
class _Recorded:
    inputs: PassInputs
    replay: Callable[[], Tensor]


class GraphedPasses:
    """Recorded passes over a cache, in `shapes`. Prompts and trees are not recorded.

    Args:
        run: runs a batch on the device. Returns last states `[N, D]`.
    """

    def __init__(
        self,
        run: Callable[[FlatBatch], Tensor],
        device: torch.device,
        cache: SlotCache,
        recorder: Recorder,
        shapes: RecordedShapes,
    ) -> None:
        self.cache, self.recorder = cache, recorder
        self._shapes, self._run, self._device = shapes, run, device
        self._recordings: Recordings[_Recorded] = Recordings(recorder)

    @property
    def shapes(self) -> int:
        """Number of recorded shapes."""
        return len(self._recordings)

    @property
    def works(self) -> bool:
        """False once recording has failed."""
        return self._recordings.works

    def record_ahead(self, speculation_length: int) -> None:
        """Record a target's decoding passes before traffic, with up to `speculation_length` drafted tokens a row.

        At most `AHEAD` of all recordings, and none where memory is short. Others are recorded when they come.
        """
        self._shapes = RecordedShapes.of_target(self.cache, speculation_length)
        for shape in self._shapes.ahead(int(AHEAD * self.recorder.most)):
            if not self.recorder.has_room:
                log.warning("device memory is short: %d shapes of passes are recorded before traffic", self.shapes)
                return
            self._recordings.get(shape, partial(self._record, shape))

    def hidden(self, batch: FlatBatch) -> Tensor:
        """Final hidden states `[N, D]`, valid until the next call."""
        host = batch.host
        shape = None if host is None else self._shapes.shape(host, host.reach)
        recorded = None if shape is None else self._recordings.get(shape, lambda: self._record(shape))
        if host is None or recorded is None:
            return self._run(batch)
        recorded.inputs.load(host)
        if batch.newest is not None:
            recorded.inputs.tokens[:, : len(host)].copy_(batch.newest)
        return recorded.replay()[: len(host)]

    def anew(self) -> GraphedPasses:
        """Return the same without recordings: the states that they keep lie elsewhere."""
        return GraphedPasses(self._run, self._device, self.cache, self.recorder, self._shapes)

    def _record(self, shape: PassShape) -> _Recorded:
        inputs = PassInputs(self.cache, shape, self._device)
        return _Recorded(inputs, self.recorder.record(lambda: self._run(inputs.batch())))
