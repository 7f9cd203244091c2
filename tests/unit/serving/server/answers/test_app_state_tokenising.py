"""Tokenisation in threads: refused requests are never tokenised, and the event loop never waits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from distillspec.serving.server.answers.app_state import MOST_COUNTING

from ..conftest import WAIT_S, Running, Serve, wait_for


class Watched:
    """Tokenizer that records its texts, and blocks at those that contain `gate` until it is opened."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.opened, self.inside = threading.Event(), 0
        self.timed_out = False  # the wait for the gate timed out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **settings: Any) -> Any:
        self._see(text)
        return self._tokenizer(text, **settings)

    def encode(self, text: str, **settings: Any) -> Any:
        self._see(text)
        return self._tokenizer.encode(text, **settings)

    def _see(self, text: str) -> None:
        self.texts.append(text)
        if "gate" in text:
            self.inside += 1
            self.timed_out |= not self.opened.wait(20)


Watch = Callable[[Running], Watched]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Put a watched tokenizer into a server. Its gate is opened at the end, whatever failed."""
    made: list[Watched] = []

    def put(running: Running) -> Watched:
        watched = Watched(running.state.codec.tokenizer)
        running.state.codec.tokenizer = running.state.engine.sequences.tokenizer = watched  # type: ignore[assignment]
        made.append(watched)
        return watched

    yield put
    for watched in made:
        watched.opened.set()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": ["a"] * 65}, None),
        ({"prompt": ["a"] * 65, "bad_words": ["b"] * 65}, None),
        ({"prompt": "a", "n": 17}, None),
        ({"prompt": [[1] * 300], "bad_words": ["b"]}, "context_length_exceeded"),
        ({"prompt": [[]] * 4097}, "invalid_value"),
        ({"prompt": ["a"] * 4097}, "invalid_value"),
        ({"prompt": "a" * 5000}, "context_length_exceeded"),
        ({"prompt": [[1] * 300], "bad_words": ["b" * 129]}, "invalid_value"),
        ({"prompt": "a", "bad_words": ["b"] * 1025}, "invalid_value"),
        ({"prompt": "a", "stop": "s" * 1025}, "invalid_value"),
        ({"prompt": "a", "speculation": {"draft": "other"}}, None),
    ],
)
def test_what_is_refused_by_its_size_is_not_tokenised(
    serve: Serve, watch: Watch, fields: dict[str, Any], code: str | None
) -> None:
    running = serve()
    watched = watch(running)
    reply = running.complete(**fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert watched.texts == []


def test_long_messages_are_not_tokenised_and_bad_words_once(serve: Serve, watch: Watch) -> None:
    running = serve()
    watched = watch(running)
    assert running.chat("a" * 5000).json()["error"]["code"] == "context_length_exceeded"
    assert watched.texts == []
    assert running.http.post("/tokenize", json={"prompt": "a" * 5000}).json()["count"] == 5000  # to see by how much
    watched.texts.clear()
    assert running.complete(prompt="a" * 100, bad_words=["zz"]).status_code == 200
    assert watched.texts == ["a" * 100, "zz", " zz"]  # each once: the engine encodes no bad word again


@pytest.mark.parametrize("fields", [{"prompt": "a gate"}, {"bad_words": ["gate"]}])
def test_the_server_answers_while_text_is_tokenised(
    serve: Serve, watch: Watch, background: ThreadPoolExecutor, fields: dict[str, Any]
) -> None:
    running = serve()
    watched = watch(running)
    slow = background.submit(running.complete, **fields)
    wait_for(lambda: watched.inside == 1)
    assert httpx.get(f"{running.url}/health", timeout=WAIT_S, trust_env=False).status_code == 200
    assert not watched.timed_out
    watched.opened.set()
    assert slow.result(WAIT_S).status_code == 200


def test_prompts_do_not_wait_for_texts_that_are_counted(
    serve: Serve, watch: Watch, background: ThreadPoolExecutor
) -> None:
    running = serve()
    watched = watch(running)
    counts = [background.submit(running.http.post, "/tokenize", json={"prompt": f"gate {i}"}) for i in range(4)]
    wait_for(lambda: watched.inside == 1)
    assert running.complete().status_code == 200
    assert (watched.inside, watched.timed_out) == (1, False)
    watched.opened.set()
    assert [one.result(WAIT_S).status_code for one in counts] == [200] * 4


def test_prompts_that_are_tokenised_take_places_in_the_queue(
    serve: Serve, watch: Watch, background: ThreadPoolExecutor
) -> None:
    running = serve(engine={"max_slots": 1}, max_queue=2)
    watched = watch(running)
    slow: list[Future[httpx.Response]] = [background.submit(running.complete, prompt=f"gate {i}") for i in range(3)]
    wait_for(lambda: running.state.bridge.places.total() == 3)
    refused = running.complete(prompt="one more")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert watched.inside <= 2  # few at a time
    assert "one more" not in watched.texts
    watched.opened.set()
    assert [one.result(WAIT_S).status_code for one in slow] == [200] * 3
    running.wait_until_idle()
    assert running.state.bridge.places.total() == 0
    assert running.complete().status_code == 200


def test_a_client_that_leaves_before_tokenisation_frees_its_place(
    serve: Serve, watch: Watch, background: ThreadPoolExecutor
) -> None:
    running = serve(engine={"max_slots": 1})
    watched = watch(running)
    slow = [background.submit(running.complete, prompt=f"gate {i}") for i in range(2)]
    wait_for(lambda: watched.inside == 2)
    leaver = HTTPConnection(running.url.removeprefix("http://"), timeout=WAIT_S)
    body = json.dumps({"model": "tiny", "prompt": "left"})
    leaver.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: running.state.bridge.places.total() == 3)
    leaver.close()
    wait_for(lambda: running.state.bridge.places.total() == 2)
    watched.opened.set()
    assert [one.result(WAIT_S).status_code for one in slow] == [200] * 2
    assert "left" not in watched.texts
    assert not watched.timed_out


def test_a_flood_of_counts_is_refused_and_leavers_are_not_counted(
    serve: Serve, watch: Watch, background: ThreadPoolExecutor
) -> None:
    running = serve()
    watched = watch(running)
    slow = background.submit(running.http.post, "/tokenize", json={"prompt": "gate"})
    wait_for(lambda: watched.inside == 1)
    leaver = HTTPConnection(running.url.removeprefix("http://"), timeout=WAIT_S)
    leaver.request("POST", "/tokenize", json.dumps({"prompt": "left"}), {"Content-Type": "application/json"})
    counting = running.state.counting
    wait_for(lambda: counting.waiting("default") == 1)
    leaver.close()
    wait_for(lambda: counting.waiting("default") == 0)
    waiting = [HTTPConnection(running.url.removeprefix("http://"), timeout=WAIT_S) for _ in range(MOST_COUNTING)]
    for one in waiting:
        one.request("POST", "/tokenize", json.dumps({"prompt": "a"}), {"Content-Type": "application/json"})
    wait_for(lambda: counting.waiting("default") == MOST_COUNTING)
    refused = running.http.post("/tokenize", json={"prompt": "one more"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    watched.opened.set()
    assert slow.result(WAIT_S).status_code == 200
    assert [one.getresponse().status for one in waiting] == [200] * MOST_COUNTING
    for one in waiting:
        one.close()
    assert not {"left", "one more"} & set(watched.texts)
