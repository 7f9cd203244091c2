"""A server over a model without a tokenizer: token ids are answered, text is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.server.listening import startup_banner

from ..conftest import SMALL, Running, start

IDS = [5, 6, 7, 8]
NO_TOKENIZER = "this model has no tokenizer; give the prompt as token ids, to /v1/completions"


@pytest.fixture(scope="module")
def bare() -> Iterator[Running]:
    engine = Engine(wrap(tiny_model(264), None, "tiny"), None, EngineSettings(**SMALL))
    running = start(engine, {}, {})
    yield running
    running.stop()
    engine.close()


def test_token_ids_are_answered(bare: Running) -> None:
    reply = bare.complete(prompt=IDS, logprobs=1)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    with closing(Engine(wrap(tiny_model(264), None, "tiny"), None, EngineSettings(**SMALL))) as engine:
        expected = engine.generate([IDS], SamplingParams(temperature=0, max_tokens=10))[0].token_ids
    assert choice["token_ids"] == list(expected)
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected]
    streamed = [
        json.loads(line.removeprefix("data: "))["choices"]
        for line in bare.complete(prompt=IDS, stream=True).text.splitlines()
        if line.startswith("data: {")
    ]
    assert [token for choices in streamed for c in choices for token in c["token_ids"]] == list(expected)


def test_text_is_refused(bare: Running) -> None:
    replies = {
        "prompt": bare.complete(prompt="abc"),
        "messages": bare.chat("Hello"),
    }
    for param, reply in replies.items():
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["message"]) == (400, param, NO_TOKENIZER)
    stop = bare.complete(prompt=IDS, stop=["x"])
    assert stop.status_code == 400
    assert stop.json()["error"]["message"] == "stop needs a tokenizer, which this model lacks; use stop_token_ids"
    for path, body in (
        ("tokenize", {"model": "tiny", "prompt": "a"}),
        ("detokenize", {"model": "tiny", "tokens": IDS}),
    ):
        assert bare.http.post(f"/{path}", json=body).status_code == 400
    bare.wait_until_idle()


def test_the_startup_banner_shows_what_works(bare: Running) -> None:
    assert '/v1/completions -H \'Content-Type: application/json\' -d \'{"model": "tiny", "prompt": [1, 2, 3]}\'' in (
        startup_banner("http://x", bare.state)
    )
