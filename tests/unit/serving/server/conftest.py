"""A real server on a free port in this process, over the tiny target. Requests go through real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from distillspec.config import DraftConfig, ServerConfig, TargetConfig
from distillspec.models import initialise_draft, load_target
from distillspec.serving import Engine, EngineSettings
from distillspec.serving.server.answers.app_state import AppState, make_app_state
from distillspec.serving.server.app import create_app
from distillspec.serving.server.http.keys import KeyRing
from distillspec.serving.server.listening import DrainingServer, bind, url_of
from distillspec.serving.step.output import StepOutput

WAIT_S = 120.0
API_KEY, ADMIN_KEY = "secret-api-key", "secret-admin-key"


@dataclass
class Running:
    """A server that answers."""

    url: str
    state: AppState
    server: DrainingServer
    thread: threading.Thread

    @property
    def http(self) -> httpx.Client:
        return self._client

    def __post_init__(self) -> None:
        self._client = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    def complete(self, **fields: Any) -> httpx.Response:
        """POST /v1/completions, greedy, ten tokens, unless told otherwise."""
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 10, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        turns = [{"role": "user", "content": text}]
        body = {"model": "tiny", "messages": turns, "max_tokens": 10, "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def wait_until_idle(self) -> None:
        """Every answer closed and every slot free."""
        wait_for(lambda: self.state.bridge.open_answers == 0 and not self.state.engine.has_work)

    def stop(self) -> None:
        self._client.close()
        self.server.should_exit = True
        self.state.closing.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


Serve = Callable[..., Running]


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def hold(running: Running) -> threading.Event:
    """Block the engine's next step until the returned event is set."""
    entered, release = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        release.wait(120)

    running.state.engine.at_next_step(wait)
    running.state.bridge.thread.wake()
    assert entered.wait(120)
    return release


@contextmanager
def held_at(running: Running, tokens: int) -> Iterator[threading.Event]:
    """Hold the engine before its next step once an answer has so many tokens. Yield an event: it is held.

    A client that leaves inside the block leaves before the end of its answer, however slow this machine is. The engine
    goes on after the block, also where that fails, and its first step then handles what was aborted meanwhile.
    """
    engine, step = running.state.engine, running.state.engine.step
    held, release = threading.Event(), threading.Event()

    def step_unless_held() -> StepOutput:
        if any(sequence.output_length >= tokens for sequence in engine.sequences.unfinished.values()):
            held.set()
            release.wait(WAIT_S)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", step_unless_held)
        try:
            yield held
        finally:
            release.set()


def start(engine: Engine, options: dict[str, Any], settings: dict[str, Any]) -> Running:
    config = ServerConfig(**{"port": 0, **settings})
    bound = bind(config)
    state = make_app_state(config, engine, **options)
    server = DrainingServer(create_app(state), state)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    return Running(url_of(bound, config), state, server, thread)


# Fixed lengths, so that what is proposed does not depend on how fast the machine is.
SMALL: dict[str, Any] = {"max_slots": 4, "max_model_len": 256, "compile": False, "controller": "fixed"}
SMALL["measure_costs_s"] = 0.0


def make_engine(*, drafts: bool = False, **settings: Any) -> Engine:
    """An engine over models of its own: servers step theirs in threads of their own."""
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    draft = initialise_draft(DraftConfig(layers=2), target) if drafts else None
    return Engine(target, draft, EngineSettings(**{**SMALL, **settings}))


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """One server for a module's harmless tests: no keys, with a draft."""
    engine = make_engine(drafts=True)
    running = start(engine, {}, {})
    yield running
    running.stop()
    engine.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(engine={…}, max_queue=1, keys=…)`: a server of the test's own."""
    made: list[tuple[Running, Engine]] = []

    def start_one(**settings: Any) -> Running:
        own = {name: settings.pop(name) for name in ("keys", "admin", "catalogue", "online") if name in settings}
        engine = make_engine(**settings.pop("engine", {}))
        if "catalogue" in own:
            own["catalogue"] = own["catalogue"](engine)
        running = start(engine, own, settings)
        made.append((running, engine))
        return running

    yield start_one
    for running, engine in made:
        running.stop()
        engine.close()


@pytest.fixture
def guarded(serve: Serve) -> Running:
    """A server with an API key and an admin key."""
    return serve(keys=KeyRing([("alice", API_KEY)]), admin=KeyRing([("admin", ADMIN_KEY)]))
