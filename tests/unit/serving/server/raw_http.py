"""Requests as raw bytes over a socket: HTTP libraries refuse to send malformed ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from .conftest import WAIT_S, Running

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@contextmanager
def connection(running: Running) -> Iterator[socket.socket]:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
        yield raw


def exchange(running: Running, request: str | bytes) -> str:
    """Send bytes as they are. Return everything until the server closes."""
    with connection(running) as raw:
        raw.sendall(request.encode("latin-1") if isinstance(request, str) else request)
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while piece := raw.recv(65536):
            received += piece
    return received.decode("utf-8", "replace")


def read_until(raw: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = raw.recv(65536)
        assert piece, received
        received += piece
    return received


def status_of(reply: str) -> int:
    return int(reply.split(" ", 2)[1])
