"""uvicorn's HTTP protocol with time limits for slow clients."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def with_time_limits(header_s: float, write_s: float) -> type[H11Protocol]:
    """Return a protocol class that aborts connections of slow clients. uvicorn itself limits only idle ones.

    Args:
        header_s: seconds to send a request's headers (against slow-loris attacks).
        write_s: seconds in which a client must take something of a full send buffer, or of the rest of it before an
            idle connection is closed. The writer waits while the buffer is full, so it does not grow.
    """

    class TimedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _unsent = 0  # bytes in the send buffer when the timer was started

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_header_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_header_timer()
            elif self._header_timer is None:
                self._start_header_timer()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start_write_timer()

        def resume_writing(self) -> None:
            if not self.transport.is_closing():
                self._stop_write_timer()
            super().resume_writing()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                self._start_write_timer()  # closing waits until the client has read the rest

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._start_write_timer()  # closing waits until the client has read the rest

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_write_timer()
            super().connection_lost(exc)

        def _start_header_timer(self) -> None:
            self._header_timer = self.loop.call_later(header_s, self.transport.abort)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _start_write_timer(self) -> None:
            if self._write_timer is None:
                self._unsent = self.transport.get_write_buffer_size()
                self._write_timer = self.loop.call_later(write_s, self._check_progress)

        def _check_progress(self) -> None:
            self._write_timer = None
            if self.transport.get_write_buffer_size() < self._unsent:  # a large body on a slow line
                self._start_write_timer()
            else:
                self.transport.abort()

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return TimedProtocol
