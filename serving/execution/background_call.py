"""A long call in a thread beside passes, which keep most of their speed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from distillspec.serving.base.threads import usable_cores

SWITCH_S = 1e-4  # a pass asks for the interpreter at every operator, and would wait 5 ms each time

_lock = threading.Lock()
_calls = 0  # that are running
_usual_s = 0.0  # the interpreter's switch interval without them
_gave_way = threading.local()  # `threads`: how many this thread had before it gave way


class BackgroundCall:
    """A call in a thread of its own, of which several may run.

    While one runs, the interpreter changes threads 50 times as often as usual. Where torch's threads take all cores,
    the caller's operators use one thread fewer: else each would wait for the core that the call has.

    Args:
        call: runs with as many of torch's threads as the caller has without giving way.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._threads = _usual_threads()
        _switch_often(1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def give_way() -> None:
        """Take as many threads as are good now. Call it in the thread of the passes, before or after each."""
        usual, giving_way = _usual_threads(), hasattr(_gave_way, "threads")
        if _calls and not giving_way and usual >= usable_cores():
            _gave_way.threads = usual
            torch.set_num_threads(max(1, usual - 1))
        elif not _calls and giving_way:
            del _gave_way.threads
            torch.set_num_threads(usual)

    @staticmethod
    def usual_threads() -> int:
        """Return the threads that this thread computes with when it does not give way."""
        return _usual_threads()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the call."""
        self._thread.join()
        self.give_way()

    def _run(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            self._call()
        finally:
            _switch_often(-1)
            torch.set_num_threads(before)  # threads that come later have as many as before


def _usual_threads() -> int:
    return int(getattr(_gave_way, "threads", torch.get_num_threads()))


def _switch_often(calls: int) -> None:
    global _calls, _usual_s
    with _lock:
        if not _calls:
            _usual_s = sys.getswitchinterval()
        _calls += calls
        sys.setswitchinterval(min(SWITCH_S, _usual_s) if _calls else _usual_s)
