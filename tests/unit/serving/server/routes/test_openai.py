"""/v1 over a real socket: answers match the engine's, streamed or whole, and unsupported fields are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from distillspec.serving import Engine, SamplingParams

from ..conftest import Running, make_engine

PROMPT = "The quick brown fox"
EVERY_OPTION: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.01,
    "seed": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.1,
    "logit_bias": {"70": 2.0, "71": -100},
    "min_tokens": 3,
    "stop": ["zz"],
    "stop_token_ids": [200],
    "ignore_eos": True,
    "bad_words": ["q"],
    "allowed_token_ids": list(range(60, 130)),
}


@pytest.fixture(scope="module")
def reference() -> Iterator[Engine]:
    """The engine itself, without a server or a draft."""
    engine = make_engine()
    yield engine
    engine.close()


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream without the final [DONE], which must be there."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_a_completion_is_the_engines(served: Running, reference: Engine) -> None:
    body = served.complete(prompt=PROMPT, max_tokens=20).json()
    expected = reference.generate([PROMPT], SamplingParams(temperature=0, max_tokens=20))[0]
    assert body["choices"] == [{"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}]
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["total_tokens"] == len(PROMPT) + 20


def test_every_sampling_option_reaches_the_engine(served: Running, reference: Engine) -> None:
    body = served.complete(prompt=PROMPT, max_tokens=30, n=2, **EVERY_OPTION).json()
    options = {**EVERY_OPTION, "logit_bias": {70: 2.0, 71: -100.0}}
    expected = reference.generate([PROMPT], SamplingParams(max_tokens=30, n=2, **options))[0]
    assert [choice["text"] for choice in body["choices"]] == [answer.text for answer in expected.completions]
    plain = served.complete(prompt=PROMPT, max_tokens=30, temperature=0.7, seed=5).json()
    assert plain["choices"][0]["text"] != body["choices"][0]["text"]


def test_several_prompts_as_text_or_ids(served: Running) -> None:
    ids = served.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    one = served.complete(prompt=PROMPT).json()["choices"][0]["text"]
    by_ids = served.complete(prompt=ids).json()["choices"]
    several = served.complete(prompt=[ids, ids[:4]], n=2, seed=1).json()["choices"]
    assert by_ids[0]["text"] == one
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert several[0]["text"] == one
    assert served.complete(prompt=[PROMPT, "x"]).json()["choices"][0]["text"] == one


def test_a_stream_adds_up_to_the_whole(served: Running) -> None:
    whole = served.complete(max_tokens=25, n=2, seed=3, temperature=1).json()
    pieces = events(
        served.complete(max_tokens=25, n=2, seed=3, temperature=1, stream=True, stream_options={"include_usage": True})
    )
    texts, reasons = ["", ""], [None, None]
    for piece in pieces[:-1]:
        assert piece["usage"] is None
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["length", "length"]
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": pieces[-1]["usage"]["prompt_tokens_details"],
    }
    assert pieces[-2]["speculation"]["proposed"] > 0
    assert len({piece["id"] for piece in pieces}) == 1


def test_a_chat_goes_through_the_template(served: Running, reference: Engine) -> None:
    body = served.chat("Hello", max_tokens=12).json()
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = reference.generate([text], SamplingParams(temperature=0, max_tokens=12))[0]
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected.text)
    reply = served.chat([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], max_tokens=12)  # type: ignore[arg-type]
    assert reply.json()["choices"][0]["message"]["content"] == expected.text


def test_a_streamed_chat_says_first_who_speaks(served: Running) -> None:
    whole = served.chat(max_completion_tokens=12, max_tokens=None).json()["choices"][0]["message"]["content"]
    pieces = events(served.chat(max_completion_tokens=12, max_tokens=None, stream=True))
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert pieces[0]["object"] == "chat.completion.chunk"
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == whole
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_an_answer_can_be_sent_back(served: Running) -> None:
    message = served.chat().json()["choices"][0]["message"]
    turns = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "Hi"}, message]
    turns.append({"role": "user", "content": "And?"})
    assert served.chat(messages=turns).status_code == 200


def test_stop_strings_end_the_answer(served: Running) -> None:
    text = served.complete(max_tokens=40).json()["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)
    choice = served.complete(max_tokens=40, stop=stop).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_logprobs_of_completions(served: Running, reference: Engine) -> None:
    body = served.complete(prompt=PROMPT, logprobs=2).json()
    found = body["choices"][0]["logprobs"]
    expected = reference.generate([PROMPT], SamplingParams(temperature=0, max_tokens=10, logprobs=2))[0].completions[0]
    assert expected.logprobs is not None
    assert found["token_logprobs"] == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
    assert len(found["tokens"]) == len(found["text_offset"]) == 10
    assert found["text_offset"][1] == len(found["tokens"][0])
    assert served.complete(prompt=PROMPT, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] is None


def test_logprobs_of_chats_spell_bytes(served: Running) -> None:
    choice = served.chat(logprobs=True, top_logprobs=3, max_tokens=20).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [3] * 20
    assert all(entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"]) for entry in entries)  # greedy
    spelt = bytes(byte for entry in entries for byte in entry["bytes"])
    assert spelt.decode(errors="replace") == choice["message"]["content"]


def test_speculation_is_set_and_reported(served: Running) -> None:
    off = served.complete(max_tokens=20, speculation={"enabled": False}).json()
    short = served.complete(max_tokens=20, speculation={"speculation_length": 1}).json()
    earlier = served.complete(max_tokens=20, speculation={"max_length": 1}).json()  # the name before
    on = served.complete(max_tokens=20).json()
    assert off["speculation"]["proposed"] == 0
    assert off["speculation"]["steps"] == 20
    assert len(short["speculation"]["tried_per_position"]) == 1
    assert len(earlier["speculation"]["tried_per_position"]) == 1
    assert on["speculation"]["draft_versions"] == [served.state.engine.draft_version]
    assert off["choices"] == short["choices"] == on["choices"]
    assert "abc" not in (on["speculation"]["draft_versions"])


def test_a_trace_has_the_kind_of_each_token(served: Running) -> None:
    body = served.complete(max_tokens=30, speculation={"trace": True}).json()
    choice = body["choices"][0]
    kinds = [token["kind"] for token in choice["speculation"]["tokens"]]
    assert kinds.count("accepted") == body["speculation"]["accepted"]
    assert {"corrected"} < set(kinds) <= {"accepted", "corrected", "bonus", "plain"}
    assert kinds[0] == "plain"
    sources = [token["source"] for token in choice["speculation"]["tokens"]]
    assert {bool(source) for kind, source in zip(kinds, sources, strict=True) if kind == "accepted"} == {True}
    earned = {source: sources.count(source) for source in body["speculation"]["sources"]}
    assert body["speculation"]["accepted_by_source"] == earned
    assert sources.count("") == len(sources) - sum(earned.values()) == len(kinds) - kinds.count("accepted")
    certain = "".join(token["text"] for token in choice["speculation"]["tokens"])
    assert choice["text"].startswith(certain)  # half a character at the very end stays with nobody


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tempratur": 1}, "tempratur"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 3}, None),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),  # found by schemathesis: logits became infinite
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"logit_bias": {"9999": 1}}, None),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"stop": [""]}, "stop.0"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"speculation": {"enabled": True, "length": 3}}, "speculation.length"),
        ({"speculation": {"draft": "other"}}, "speculation.draft"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(served: Running, fields: dict[str, Any], param: str | None) -> None:
    error = refused(served.complete(**fields))
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[0] in error["message"] or error["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages.0.name"),
        ({"top_logprobs": 2}, None),
        ({"max_completion_tokens": 3}, None),
    ],
)
def test_what_chats_cannot_honour_is_refused_by_name(
    served: Running, fields: dict[str, Any], param: str | None
) -> None:
    error = refused(served.chat(**fields))
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_unsupported_fields_without_effect_are_accepted(served: Running) -> None:
    nothing = {"tools": [], "tool_choice": "none", "store": False, "response_format": {"type": "text"}, "user": "u"}
    assert served.chat(**nothing, parallel_tool_calls=None).status_code == 200


NOTES: dict[str, Any] = {
    "metadata": {"run": "3"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "stream_options": {"include_obfuscation": True},
}


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a_clients_own_notes_are_taken_and_change_nothing(served: Running, route: str) -> None:
    def written(**fields: Any) -> str:
        choices = [piece["choices"][0] for piece in events(getattr(served, route)(**fields, stream=True))]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)

    assert written(**NOTES) == written() != ""
    assert refused(served.complete(metadata={"run": 3}))["param"] == "metadata.run"
    assert refused(served.complete(metadata={str(i): "x" for i in range(17)}))["param"] == "metadata"


@pytest.mark.parametrize("field", ["tools", "functions"])
def test_tools_are_said_to_be_unsupported(served: Running, field: str) -> None:
    error = refused(served.chat(**{field: [{"type": "function", "function": {"name": "f"}}]}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"] == f"{field} is not supported by this server"


def test_a_context_that_is_full_has_openais_code(served: Running) -> None:
    assert refused(served.complete(prompt="x" * 300))["code"] == "context_length_exceeded"


def test_other_models_and_paths_do_not_exist(served: Running) -> None:
    assert refused(served.complete(model="gpt-4"), 404)["code"] == "model_not_found"
    assert refused(served.http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert refused(served.http.get("/v2/models"), 404)["code"] == "unknown_url"
    assert refused(served.http.get("/v1/completions"), 405)["code"] == "method_not_allowed"


def test_models_and_tokens(served: Running) -> None:
    listed = served.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]
    assert served.http.get("/v1/models/tiny").json() == listed[0]
    ids = served.http.post("/tokenize", json={"prompt": "héllo"}).json()
    assert ids["count"] == 6
    assert served.http.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "héllo"}
    turns = served.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    text = served.http.post("/detokenize", json={"tokens": turns["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert refused(served.http.post("/detokenize", json={"tokens": [100000]}))["param"] == "tokens"


def test_request_ids_come_back(served: Running) -> None:
    own = served.http.get("/version", headers={"X-Request-Id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    made = served.http.get("/version", headers={"X-Request-Id": "bad id\tx"})
    assert made.headers["x-request-id"].startswith("req-")


def test_the_slots_are_free_afterwards(served: Running) -> None:
    served.wait_until_idle()
    assert served.state.engine.sequences.unfinished == {}
