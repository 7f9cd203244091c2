"""Stop requests: SIGINT and SIGTERM end a run after the current step, with the state saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Record of the first signal. A second SIGINT ends the process as usual."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal_number is not None


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the block, and restore earlier handlers afterwards."""
    request = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        if request.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal_number = request.signal_number or number

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
