"""uvicorn's HTTP protocol with limits on slow clients: to send a request's headers, and to take what is sent."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def with_time_limits(header_s: float, write_s: float) -> type[H11Protocol]:
    """A protocol that cuts connections whose client is too slow; uvicorn itself limits only idle ones.

    Args:
        header_s: a request's headers must be whole so long after they began (slow-loris).
        write_s: what waits to be sent must have gone so long after there was too much of it, or after an idle
            connection was to be closed. Until then whoever writes waits, so that no more is held.
    """

    class TimedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

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
            self._stop_write_timer()
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._start_write_timer()  # closing waits for what was not taken

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
                self._write_timer = self.loop.call_later(write_s, self.transport.abort)

        def _stop_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

    return TimedProtocol
