"""Server-sent events that end when the client goes away or stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not collect events


def event(data: Any) -> bytes:
    """One event of JSON."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come.

    They end, and `on_end` is called, as soon as the client disconnects, or has not taken a piece for
    `write_timeout_s`: then the connection is cut, and what was not sent is dropped.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], write_timeout_s: float, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(HEADERS)
        self._events, self._write_timeout_s, self._on_end = events, write_timeout_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._on_end()
        if not sending.cancelled() and (problem := sending.exception()) is not None:
            raise problem

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._events:
                async with asyncio.timeout(self._write_timeout_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone; its body must be read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine, or None where the client left first, which cancels it."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
