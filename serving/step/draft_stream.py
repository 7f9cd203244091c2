"""Order of drafts that run beside the target on CUDA: a stream of their own, and events between it and the target's.

Work of one stream runs in order, that of two at the same time. Drafts of a step wait for what the target's stream had
been given before the step: texts, caches and states of the step before. The target waits for the drafts of each
micro-batch, whose distributions it reads. What a step leaves behind waits for all of them.

Drafts on another device hand over through the target's device, in this stream too: in the target's own stream a
hand-over would wait for the verification that it is to run beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class DraftStream:
    """A stream on the target's device, for the thread that drafts.

    Args:
        device: the target's.
        cuda: `torch.cuda`, or what stands for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)
        self._begun: Any = None  # event of the target's stream, when the step began

    def in_order(
        self, ahead: Callable[[Callable[[T], tuple[R, Any]]], Iterator[tuple[T, tuple[R, Any]]]], work: Callable[[T], R]
    ) -> Iterator[tuple[T, R]]:
        """Yield each item with its result. Work that the caller launches then comes after what made the result.

        Args:
            ahead: runs what it is given on all items in the thread that drafts, and yields items and results in order.
            work: launches the drafts of an item, in that thread.
        """
        main = self._cuda.current_stream(self._device)
        self._begun = main.record_event()
        results = ahead(lambda item: self._launch(work, item))
        try:
            for item, (result, drafted) in results:
                main.wait_event(drafted)
                yield item, result
        finally:
            results.close()  # type: ignore[attr-defined]  # waits for the thread, after an error too
            main.wait_stream(self._stream)

    def _launch(self, work: Callable[[T], R], item: T) -> tuple[R, Any]:
        """Run work in the thread that drafts. Return its result, and the event after all that it launched."""
        with self._cuda.stream(self._stream):
            self._stream.wait_event(self._begun)
            return work(item), self._stream.record_event()
