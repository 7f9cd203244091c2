"""SIGINT and SIGTERM as a request to stop at the next step border, with the state saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Remembers the first signal; a second SIGINT ends the process as usual."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def asked(self) -> bool:
        return self.signal_number is not None


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the block; earlier handlers are back afterwards."""
    request = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        if request.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal_number = request.signal_number or number

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
