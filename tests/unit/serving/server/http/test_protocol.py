"""A client that reads nothing is cut off, one that reads slowly is not."""

from __future__ import annotations

import json
import re
import socket
import time

import pytest

from ..conftest import Serve, wait_for

LARGE = "some words " * 8_000  # its token ids are more than the sockets hold between the two


@pytest.mark.parametrize("close", [False, True], ids=["kept alive", "to be closed"])
def test_a_client_that_reads_nothing_is_cut_off(serve: Serve, close: bool) -> None:
    running = serve(write_timeout_s=0.3)
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": LARGE}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += ("Connection: close\r\n" if close else "") + f"Content-Length: {len(body)}\r\n\r\n"
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening = running.server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections to come
        raw.connect((host, int(port)))
        raw.sendall(head.encode() + body)
        wait_for(lambda: running.server.server_state.total_requests == 1)
        wait_for(lambda: not running.server.server_state.connections)
        reply = received(raw)
    announced = re.search(rb"content-length: (\d+)", reply)
    assert announced is not None
    assert len(reply) < int(announced[1]) / 2
    assert running.complete().status_code == 200


def test_a_closing_connection_is_cut_off_though_its_rest_is_small(serve: Serve) -> None:
    """The rest is below the mark at which the writer would wait, and nobody reads it."""
    running = serve(write_timeout_s=0.3)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(f"GET /openapi.json HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        wait_for(lambda: running.server.server_state.total_requests == 1)
        wait_for(lambda: not running.server.server_state.connections)
    assert running.complete().status_code == 200


def received(raw: socket.socket) -> bytes:
    """Read until the server closes."""
    reply = b""
    while piece := raw.recv(1 << 20):
        reply += piece
    return reply


def test_a_client_that_reads_slowly_is_served(serve: Serve) -> None:
    """The whole body is in the buffer at once, and takes longer than the limit to leave it.

    The limit is many reads long, since this thread may have to wait for a processor.
    """
    running = serve(write_timeout_s=1.5)
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": LARGE}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        reply, started = b"", time.monotonic()
        while piece := raw.recv(16 << 10):
            reply += piece
            time.sleep(0.1 if time.monotonic() - started < 4 else 0)
    announced = re.search(rb"content-length: (\d+)", reply)
    assert announced is not None
    assert reply.split(b"\r\n\r\n", 1)[1].startswith(b'{"tokens"')
    assert len(reply.split(b"\r\n\r\n", 1)[1]) == int(announced[1])
