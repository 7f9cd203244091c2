"""Bodies that are refused: invalid, mutated, or too costly to validate."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from distillspec.serving.server.http.bodies import check_shape
from distillspec.serving.server.http.errors import ApiError, from_validation
from distillspec.serving.server.http.schemas import CompletionBody

from ..conftest import Running, Serve

BODY: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 0}

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    2**40,
    10**30,
    0.5,
    -1e308,
    "",
    "x",
    "\0",
    "é" * 50,
    [],
    [[]],
    {},
    {"a": []},
)


def mutated(body: dict[str, Any], dice: random.Random) -> bytes:
    """A body with one to three things changed: fields, values, or bytes."""
    changed = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 3)):
        choice = dice.random()
        name = dice.choice([*body, "n", "stop", "logprobs", "seed", "stream", "logit_bias", "speculation", "x"])
        if choice < 0.2:
            changed.pop(name, None)
        elif choice < 0.9:
            changed[name] = dice.choice(VALUES)
    raw = bytearray(json.dumps(changed).encode())
    if dice.random() < 0.3 and raw:
        for _ in range(dice.randint(1, 4)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": "x", "speculation": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "logit_bias": {"-1": 1}}',
        b"\x1f\x8b\x08\x00garbage",
    ],
)
def test_bodies_that_are_no_request_are_refused(served: Running, body: bytes) -> None:
    reply = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert len(reply.text) < 1000


def test_mutated_bodies_do_no_harm(serve: Serve) -> None:
    served = serve(engine={"max_model_len": 32, "drafts": True})
    quiet = served.complete(max_tokens=5).json()["choices"]
    dice = random.Random(0)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    statuses = set()
    for round_ in range(200):
        path, body = (("completions", BODY), ("chat/completions", chat))[round_ % 2]
        raw = mutated(body, dice)
        reply = served.http.post(f"/v1/{path}", content=raw, headers={"Content-Type": "application/json"})
        statuses.add(reply.status_code)
        assert reply.status_code in (200, 400, 404), (raw, reply.text)
    assert statuses == {200, 400, 404}
    served.wait_until_idle()
    assert served.complete(max_tokens=5).json()["choices"] == quiet


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
