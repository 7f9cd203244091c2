"""Text is tokenised late, elsewhere and within bounds: what is refused costs no tokenizer call, and nobody waits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from distillspec.serving.server.bodies import check_shape
from distillspec.serving.server.errors import ApiError, from_validation
from distillspec.serving.server.schemas import CompletionBody

from .conftest import WAIT_S, Running, Serve, wait_for


class Watched:
    """A tokenizer that counts the texts it is given, and stops at those that contain `gate` until it is opened."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.opened, self.inside = threading.Event(), 0
        self.in_vain = False  # nobody opened the gate while it was waited for

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
            self.in_vain |= not self.opened.wait(20)


Watch = Callable[[Running], Watched]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Put a watched tokenizer into a server; its gate is open at the end, whatever failed."""
    made: list[Watched] = []

    def put(running: Running) -> Watched:
        watched = Watched(running.parts.codec.tokenizer)
        running.parts.codec.tokenizer = running.parts.engine.core.roster.tokenizer = watched  # type: ignore[assignment]
        made.append(watched)
        return watched

    yield put
    for watched in made:
        watched.opened.set()


@pytest.fixture
def behind() -> Iterator[ThreadPoolExecutor]:
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
    serve: Serve, watch: Watch, behind: ThreadPoolExecutor, fields: dict[str, Any]
) -> None:
    running = serve()
    watched = watch(running)
    slow = behind.submit(running.complete, **fields)
    wait_for(lambda: watched.inside == 1)
    assert httpx.get(f"{running.url}/health", timeout=WAIT_S, trust_env=False).status_code == 200
    assert not watched.in_vain
    watched.opened.set()
    assert slow.result(WAIT_S).status_code == 200


def test_prompts_do_not_wait_for_texts_that_are_counted(serve: Serve, watch: Watch, behind: ThreadPoolExecutor) -> None:
    running = serve()
    watched = watch(running)
    asked = [behind.submit(running.http.post, "/tokenize", json={"prompt": f"gate {i}"}) for i in range(4)]
    wait_for(lambda: watched.inside == 1)
    assert running.complete().status_code == 200
    assert (watched.inside, watched.in_vain) == (1, False)
    watched.opened.set()
    assert [one.result(WAIT_S).status_code for one in asked] == [200] * 4


def test_prompts_that_are_tokenised_take_places_in_the_queue(
    serve: Serve, watch: Watch, behind: ThreadPoolExecutor
) -> None:
    running = serve(engine={"max_slots": 1}, max_queue=2)
    watched = watch(running)
    slow: list[Future[httpx.Response]] = [behind.submit(running.complete, prompt=f"gate {i}") for i in range(3)]
    wait_for(lambda: running.parts.bridge._places.total() == 3)
    refused = running.complete(prompt="one more")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert watched.inside <= 2  # few at a time
    assert "one more" not in watched.texts
    watched.opened.set()
    assert [one.result(WAIT_S).status_code for one in slow] == [200] * 3
    running.wait_until_idle()
    assert running.parts.bridge._places.total() == 0
    assert running.complete().status_code == 200


def test_who_leaves_while_waiting_to_be_tokenised_gives_the_place_back(
    serve: Serve, watch: Watch, behind: ThreadPoolExecutor
) -> None:
    running = serve(engine={"max_slots": 1})
    watched = watch(running)
    slow = [behind.submit(running.complete, prompt=f"gate {i}") for i in range(2)]
    wait_for(lambda: watched.inside == 2)
    leaver = HTTPConnection(running.url.removeprefix("http://"), timeout=WAIT_S)
    body = json.dumps({"model": "tiny", "prompt": "left"})
    leaver.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_for(lambda: running.parts.bridge._places.total() == 3)
    leaver.close()
    wait_for(lambda: running.parts.bridge._places.total() == 2)
    watched.opened.set()
    assert [one.result(WAIT_S).status_code for one in slow] == [200] * 2
    assert "left" not in watched.texts
    assert not watched.in_vain


@pytest.mark.parametrize("part", ["[]", "{}", "[1]"])
def test_a_body_of_very_many_lists_is_refused_before_it_is_validated(part: str) -> None:
    body = f'{{"prompt": [{",".join([part] * 20_000)}]}}'
    with pytest.raises(ApiError, match=r"the body has 2000\d lists and objects"):
        check_shape(body.encode())


@pytest.mark.parametrize("text", ["[" * 20_000, '\\"[{' * 20_000, "\\\\" + "{" * 20_000])
def test_brackets_in_texts_are_no_lists(text: str) -> None:
    check_shape(json.dumps({"prompt": text}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [-1] * 100_000},
        {"prompt": [None] * 100_000},
        {"prompt": [[-1]] * 100_000},
        {"allowed_token_ids": [-1] * 100_000},
        {"stop_token_ids": [-1] * 100_000},
        {"stop": [1] * 100_000},
        {"bad_words": [1] * 100_000},
    ],
)
def test_the_errors_of_a_list_are_not_collected(fields: dict[str, Any]) -> None:
    """A million of them took a minute and gigabytes, on the event loop."""
    with pytest.raises(ValidationError) as refusal:
        CompletionBody.model_validate_json(json.dumps({"model": "tiny", "prompt": "a", **fields}))
    assert refusal.value.error_count() < 10
    assert next(iter(fields)) in from_validation(refusal.value).message


def test_a_body_with_very_many_errors_is_refused_as_a_whole() -> None:
    strange = {f"x{place}": 0 for place in range(1001)}
    with pytest.raises(ValidationError) as refusal:
        CompletionBody.model_validate_json(json.dumps({"model": "tiny", "prompt": "a", **strange}))
    assert "1001 errors" in from_validation(refusal.value).message
