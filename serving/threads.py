"""Which threads compute beside each other, and with how many cores each.

OpenMP gives every thread that computes in parallel a pool of workers of its own, and keeps it as long as that thread
lives. Where all pools together have more threads than the machine has cores, GNU's OpenMP (that of torch's builds for
CPUs) puts workers to sleep after every operation instead of letting them wait a moment for the next one: a step has
hundreds. So the thread that steps an engine has the only pool; others compute alone, or in a thread that ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def in_own_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread that has ended by then, and its pool with it."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    # No executor: at Ctrl-C it would wait until a model is loaded.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    return outcome.result()


def compute_alone() -> None:
    """This thread, and threads that begin to compute later, use one core; those that compute already keep theirs."""
    torch.set_num_threads(1)
