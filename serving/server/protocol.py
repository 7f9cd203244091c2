"""uvicorn's HTTP protocol with a limit on how long a request's headers may take (slow-loris)."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def with_header_timeout(limit_s: float) -> type[H11Protocol]:
    """A protocol that closes connections whose headers are not whole `limit_s` after they began.

    uvicorn itself limits only how long a connection may idle between requests.
    """

    class TimedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._header_timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._header_timer = self.loop.call_later(limit_s, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return TimedProtocol
