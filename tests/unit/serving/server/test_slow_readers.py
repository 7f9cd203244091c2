"""Clients that take nothing are cut off; clients that are sent away are told for how long."""

from __future__ import annotations

import json
import re
import socket

import pytest

from distillspec.serving.server.pace import LONGEST_S, RECENT, Pace

from .conftest import Serve, wait_for

LARGE = "some words " * 8_000  # its token ids are more than the sockets hold between the two


@pytest.mark.parametrize("close", [False, True], ids=["kept alive", "to be closed"])
def test_a_client_that_takes_nothing_is_cut_off(serve: Serve, close: bool) -> None:
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


def received(raw: socket.socket) -> bytes:
    """Everything that still comes."""
    whole = b""
    while piece := raw.recv(1 << 20):
        whole += piece
    return whole


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_is_the_ends_it_takes_at_the_recent_pace() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin()
    assert pace.seconds_until(5) == 1, "nothing has ended yet"
    for _ in range(4):
        clock.now += 2.0
        pace.ended(1)
    assert (pace.seconds_until(1), pace.seconds_until(3)) == (2, 6)
    clock.now += 8.0
    assert pace.seconds_until(1) == 4, "it has become slower"
    pace.ended(3)
    assert pace.seconds_until(3) == 7, "16 s for 7 answers"
    assert pace.seconds_until(10**6) == LONGEST_S


def test_the_pace_forgets_idle_times_and_long_ago() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin()
    clock.now += 1000.0
    pace.begin()
    clock.now += 3.0
    pace.ended(1)
    assert pace.seconds_until(1) == 3
    for _ in range(RECENT):
        clock.now += 0.1
        pace.ended(1)
    assert pace.seconds_until(10) == 1
