"""Thread that drafts a step's micro-batches while the target verifies those before, on CPUs with cores of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from distillspec.serving.base.threads import compute_with

T = TypeVar("T")
R = TypeVar("R")

DRAFT_SHARE = 4  # of so many cores the drafts have one


class DraftThread:
    """Runs work in order, ahead of whoever takes the results. Its cores are taken from the caller's.

    With one core nothing is gained: check `cores` before.

    Args:
        computes: False for work that is launched on other devices, which takes no cores.
    """

    def __init__(self, computes: bool = True) -> None:
        self.cores = torch.get_num_threads()
        self._threads = max(1, self.cores // DRAFT_SHARE)
        self._computes = computes
        self._executor: ThreadPoolExecutor | None = None

    def ahead(self, items: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
        """Yield each item with its result, in order, while the thread works on those behind."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                1, thread_name_prefix="drafts", initializer=compute_with, initargs=(self._threads,)
            )
        if self._computes:
            torch.set_num_threads(self.cores - self._threads)
        waiting = [self._executor.submit(_inferring, work, item) for item in items]
        try:
            for item, result in zip(items, waiting, strict=True):
                yield item, result.result()
        finally:
            wait(waiting)  # after an error too: sequences may change from here on
            if self._computes:
                torch.set_num_threads(self.cores)

    def stop(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


@torch.inference_mode()
def _inferring(work: Callable[[T], R], item: T) -> R:
    return work(item)
