"""A long call in a thread beside passes, which keep most of their speed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch

SWITCH_S = 1e-4  # a pass asks for the interpreter at every operator, and each time would wait 5 ms

_lock = threading.Lock()
_calls = 0  # that are running
_usual_s = 0.0  # the interpreter's switch interval without them


class Beside:
    """A call in a thread of its own.

    While it runs, the interpreter changes threads 50 times as often as usual. Where torch's threads take all cores,
    the caller's operators use one fewer: each would wait for the core that the call has.

    Args:
        call: runs with as many of torch's threads as the caller has.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._threads = torch.get_num_threads()
        self._gave_way = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give_way(self) -> None:
        """Take as many threads as are good now. Call it in the thread of the passes, before or after each."""
        if self._gave_way != self._thread.is_alive():
            self._gave_way = not self._gave_way
            fewer = self._gave_way and self._threads >= _cores()
            torch.set_num_threads(max(1, self._threads - 1) if fewer else self._threads)

    def join(self) -> None:
        """Wait for the call."""
        self._thread.join()
        self.give_way()

    def _run(self) -> None:
        own = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        _switch_often(1)
        try:
            self._call()
        finally:
            _switch_often(-1)
            torch.set_num_threads(own)  # threads that come later have as many as before


def _switch_often(calls: int) -> None:
    global _calls, _usual_s
    with _lock:
        if not _calls:
            _usual_s = sys.getswitchinterval()
        _calls += calls
        sys.setswitchinterval(min(SWITCH_S, _usual_s) if _calls else _usual_s)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
