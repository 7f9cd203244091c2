"""The server's socket, bound before models are loaded, and its shutdown on a signal."""

from __future__ import annotations

import asyncio
import errno
import json
import shlex
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.server.answers.app_state import AppState
from distillspec.serving.server.guard import HEADER_BYTES
from distillspec.serving.server.http.protocol import with_time_limits

FLUSH_S = 5  # to send the last bytes of finished answers
DEAD_S = 10.0  # that a server answers 503 after its engine has failed for good, before it ends
KEEP_ALIVE_S = 75  # of idle connections: longer than clients and proxies, or they may use one that closes


def check_exposure(config: ServerConfig, has_keys: bool) -> None:
    """Refuse to listen beyond this machine without an API key.

    Raises:
        ConfigError: anyone who reaches the port could use the server.
    """
    if not config.is_local and not has_keys and not config.allow_open:
        raise ConfigError(
            f"server.host={config.host} is reachable from elsewhere, and there is no API key: set "
            "server.api_key_file=FILE, or server.allow_open=true if that is intended"
        )


def bind(config: ServerConfig) -> socket.socket:
    """Bind the server's socket. The port is taken from here on.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"server.host={config.host} is not an address: {problem}") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(1)  # takes the port. uvicorn enlarges the backlog
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"server.port={config.port} is in use; choose another, or server.port=0 for a free one"
            ) from error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    return bound


def url_of(bound: socket.socket, config: ServerConfig) -> str:
    """Return the server's URL for clients on this machine."""
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


class DrainingServer(uvicorn.Server):
    """Server that drains on the first SIGTERM or SIGINT, for up to `server.drain_s`, and stops at once on the second.

    Afterwards `signal_number` is the signal that ended it, and `aborted_answers` the number of unfinished answers.
    """

    def __init__(self, app: FastAPI, state: AppState) -> None:
        limits = state.config
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
                limit_concurrency=limits.max_connections + 1,  # it refuses from so many on
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FLUSH_S,
            )
        )
        self.state = state
        self.signal_number: int | None = None
        self.aborted_answers = 0
        self._draining: asyncio.Task[None] | None = None
        self._dead_at: float | None = None

    async def on_tick(self, counter: int) -> bool:
        return self._is_dead() or await super().on_tick(counter)

    def _is_dead(self) -> bool:
        """Return True if the engine stopped for good some seconds ago: a supervisor starts the process again."""
        if self.state.bridge.dead is None:
            return False
        now = time.monotonic()
        self._dead_at = self._dead_at or now
        if now - self._dead_at < DEAD_S:
            return False
        self.state.closing.set()
        return True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Runs between two bytecodes of the main thread."""
        if not self.started:  # nothing to drain yet
            self.signal_number, self.should_exit = sig, True
        elif self.signal_number is None:
            self.signal_number = sig
            self._loop.call_soon_threadsafe(self._start_draining)
        else:
            self._loop.call_soon_threadsafe(self._stop_now)

    def _start_draining(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        limit_s = self.state.config.drain_s
        if not await self.state.bridge.drain(limit_s):
            self._abort_all(f"the server is shutting down, and {limit_s:g} s to finish are over")
        self.state.closing.set()
        self.should_exit = True

    def _stop_now(self) -> None:
        self._abort_all("the server was told to stop at once")
        self.state.closing.set()
        self.should_exit = True

    def _abort_all(self, reason: str) -> None:
        name = signal.Signals(self.signal_number or signal.SIGTERM).name
        self.aborted_answers += self.state.bridge.abort_all(f"{reason} ({name})")


def startup_banner(url: str, state: AppState) -> str:
    """Return the text printed at the start: the URL and a command to try."""
    example: dict[str, Any]
    path, example = "chat/completions", {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    if state.codec.tokenizer is None:
        path, example = "completions", {"prompt": [1, 2, 3]}
    body = shlex.quote(json.dumps({"model": state.model, **example}))
    key = ' -H "Authorization: Bearer $KEY"' if state.keys else ""
    drafts = list(state.engine.drafts) if selecting(state.engine.controller) is not None else []
    several = f"\n  drafts: {', '.join(drafts)}, chosen by {state.engine.settings.selection}" if drafts else ""
    learning = "" if state.online is None else f"\n  learning from the traffic: {state.online.place}"
    settings, lossy, idle = state.engine.settings, "", ""
    if state.engine.proposer is None and settings.proposer is None:
        idle = "\n  nothing is drafted. With a trained draft: draft.path=RUN. Without one: engine.proposer=ngram"
    if not settings.is_exact:
        lossy = f"\n  verification={settings.verification} is lossy: answers may differ from the target's own"
    return (
        f"{state.model} at {url}/v1, dashboard at {url}/, stop with Ctrl-C; try:\n"
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {body}{several}{learning}{lossy}{idle}"
    )
