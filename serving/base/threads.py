"""Threads that compute beside each other, and the cores of each.

OpenMP gives every thread that computes in parallel its own pool of workers, for as long as the thread lives. Where the
pools together have more threads than the machine has cores, GNU's OpenMP (used by torch's builds for CPUs) puts workers
to sleep after every operation instead of spinning until the next one. A step has hundreds of operations. So only the
thread that steps an engine has a pool. Others compute with one core, or in a thread that ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_own_thread(work: Callable[[], T]) -> T:
    """Return or raise what `work` does, run in a thread that has ended by then, and its pool with it."""
    outcome: Future[T] = Future()
    # Not an executor: at Ctrl-C it would wait until a model is loaded.
    thread = threading.Thread(target=settle, args=(outcome, work), daemon=True)
    thread.start()
    thread.join()
    return outcome.result()


def settle(outcome: Future[T], work: Callable[[], T]) -> None:
    """Run `work`, and put what it returns or raises into `outcome`."""
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)


def compute_with(cores: int) -> None:
    """Let this thread and threads that are new to torch use so many cores. Existing pools stay.

    A thread takes over the number that was set last, by any thread, when it uses torch for the first time. So it has to
    use torch before its own number is set: set alone, it is forgotten at the first operation.
    """
    torch.get_num_threads()
    torch.set_num_threads(cores)


def compute_alone() -> None:
    """Let this thread and threads that are new to torch use one core. Existing pools stay."""
    compute_with(1)
