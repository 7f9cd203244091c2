"""Addresses the server may listen on, and how many connections it takes."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.config import ServerConfig
from distillspec.errors import ConfigError
from distillspec.serving.server.listening import bind, check_exposure, startup_banner

from .conftest import Serve, wait_for
from .raw_http import connection, exchange, read_until, status_of


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.0.2.1"])
def test_listening_wider_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.allow_open"):
        check_exposure(ServerConfig(host=host), has_keys=False)
    check_exposure(ServerConfig(host=host), has_keys=True)
    check_exposure(ServerConfig(host=host, allow_open=True), has_keys=False)
    check_exposure(ServerConfig(host="::1"), has_keys=False)


def test_a_port_in_use_is_named() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is in use"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        bind(ServerConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match=r"server\.host=a\.\.b is not an address"):
        bind(ServerConfig(host="a..b", port=0))


def test_the_banner_of_a_server_that_drafts_nothing_says_what_would(serve: Serve) -> None:
    def banner(**engine: Any) -> str:
        running = serve(engine=engine)
        return startup_banner(running.url, running.state)

    assert "nothing is drafted. With a trained draft: draft.path=RUN. Without one: engine.proposer=ngram" in banner()
    assert "nothing is drafted" not in banner(proposer="none"), "as it was told"
    assert "nothing is drafted" not in banner(proposer="ngram")
    assert "nothing is drafted" not in banner(drafts=True)


def test_as_many_connections_are_served_as_the_setting_says(serve: Serve) -> None:
    running = serve(max_connections=1)
    ask = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connection(running) as first:
        first.sendall(ask)
        assert read_until(first, b"}").startswith(b"HTTP/1.1 200")
        assert status_of(exchange(running, ask)) == 503, "the first one is still open"
        wait_for(lambda: len(running.server.server_state.connections) == 1)
        first.sendall(ask)
        assert read_until(first, b"}").startswith(b"HTTP/1.1 200")
    wait_for(lambda: not running.server.server_state.connections)
    with connection(running) as second:
        second.sendall(ask)
        assert read_until(second, b"}").startswith(b"HTTP/1.1 200")
