"""Throttle of the trainer: it computes freely while no request runs, and a small share of the time while some do.

On a CPU a low priority does not protect requests: the engine's threads wait for the one whose core the trainer has, and
both read their weights through one memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distillspec.serving.online.state.busy_mark import BusyMark
from distillspec.serving.online.state.layout import OnlineSettings

LOOK_S = 0.01  # between looks for the end of the last request


class Throttle:
    """Called between pieces of work, it waits as long as the work before it must not have been quicker.

    Args:
        busy: returns True while requests run.
        share: CPU seconds a second that may be used while they do.
        stopped: returns True once the trainer is to end. Nothing waits then.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        share: float,
        stopped: Callable[[], bool] = lambda: False,
        *,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy, self._stopped = busy, stopped
        self._pause = 1 / share - 1 if share > 0 else math.inf  # seconds to wait after a second of work
        self._used, self._clock, self._sleep = used, clock, sleep
        self._before_s, self._owed_s = used(), 0.0
        self.waited_s = 0.0

    def __call__(self) -> None:
        """Wait while requests run, until the CPU time since the last call is the share of the time."""
        if self._must_wait():
            self._owed_s += self._pause * max(1e-9, self._used() - self._before_s)
            began_s = self._clock()
            while self._clock() - began_s < self._owed_s and self._must_wait():
                self._sleep(LOOK_S)
            waited_s = self._clock() - began_s
            self._owed_s -= waited_s  # what it slept too long is credit
            self.waited_s += waited_s
        else:
            self._owed_s = 0.0
        self._before_s = self._used()

    def _must_wait(self) -> bool:
        return self._busy() and not self._stopped()


@contextmanager
def throttled(settings: OnlineSettings, stopped: Callable[[], bool]) -> Iterator[Throttle | None]:
    """Throttle all modules that this process calls, forward and backward. None: `adapt.busy_share` is 1."""
    share = settings.adapt.busy_share
    if share >= 1:
        yield None
        return
    with closing(BusyMark(settings.layout.busy)) as mark:
        throttle = Throttle(lambda: mark.busy, share, stopped)
        hooks = [
            register_module_forward_pre_hook(lambda *_: throttle()),
            register_module_forward_hook(_backward(throttle)),
        ]
        try:
            yield throttle
        finally:
            for hook in hooks:
                hook.remove()


def _backward(throttle: Throttle) -> Callable[[nn.Module, object, object], None]:
    """Return a hook after whose modules the backward pass waits too."""

    def follow(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: throttle())

    return follow
