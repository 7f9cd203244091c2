"""The server's socket and its life: bound before anything is loaded, drained on a signal."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.parts import Parts
from distillspec.serving.server.protocol import with_time_limits

FLUSH_S = 5  # for the last bytes of answers that are done
KEEP_ALIVE_S = 75  # of idle connections: longer than clients and proxies keep theirs, or they send into a closing one


def check_exposure(config: ServerConfig, has_keys: bool) -> None:
    """Refuse to listen beyond this machine without a key.

    Raises:
        ConfigError: it would be open to everyone who reaches the port.
    """
    if not config.is_local and not has_keys and not config.allow_open:
        raise ConfigError(
            f"server.host={config.host} is reachable from elsewhere, and there is no API key: set "
            "server.api_key_file=FILE, or server.allow_open=true if that is wanted"
        )


def bind(config: ServerConfig) -> socket.socket:
    """The server's socket, not listening yet.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"server.host={config.host} is no address: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(1)  # others find the port taken from here on; uvicorn widens the queue
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"server.port={config.port} is in use; choose another, or server.port=0 for a free one"
            ) from error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    return bound


def url_of(bound: socket.socket, config: ServerConfig) -> str:
    """Where clients on this machine find it."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


class DrainingServer(uvicorn.Server):
    """Stops on the first SIGTERM or SIGINT when what runs is done or the limit is over; at once on the second.

    `signal_number` and `lost` tell afterwards what ended it, and how many answers were cut off.
    """

    def __init__(self, app: FastAPI, parts: Parts) -> None:
        limits = parts.config
        super().__init__(
            uvicorn.Config(
                app,
                http=with_time_limits(limits.header_timeout_s, limits.write_timeout_s),
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=limits.max_connections,
                h11_max_incomplete_event_size=limits.max_header_kib * 1024,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FLUSH_S,
            )
        )
        self.parts = parts
        self.signal_number: int | None = None
        self.lost = 0
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; runs between two bytecodes of the main thread."""
        if not self.started:  # nothing to drain yet
            self.signal_number, self.should_exit = sig, True
        elif self.signal_number is None:
            self.signal_number = sig
            self._loop.call_soon_threadsafe(self._begin_to_drain)
        else:
            self._loop.call_soon_threadsafe(self._end_now)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        limit_s = self.parts.config.drain_s
        if not await self.parts.bridge.drain(limit_s):
            self._cut(f"the server is shutting down, and {limit_s:g} s to finish are over")
        self.parts.closing.set()
        self.should_exit = True

    def _end_now(self) -> None:
        self._cut("the server was told to stop at once")
        self.parts.closing.set()
        self.should_exit = True

    def _cut(self, reason: str) -> None:
        name = signal.Signals(self.signal_number or signal.SIGTERM).name
        self.lost += self.parts.bridge.cut(f"{reason} ({name})")
