"""`distill bench url=` against real servers: everything sent is answered once or counted as failed, with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distillspec.errors import ConfigError
from distillspec.serving import SamplingParams
from distillspec.serving.bench.answer_stream import AnswerStream, StreamFailed
from distillspec.serving.bench.drive_server import drive_server
from distillspec.serving.bench.load import Arrival, Question, poisson_load
from distillspec.serving.bench.servers import Server, SpeculationCounts, counts_in, find_server

from ..server.conftest import API_KEY, WAIT_S, Running, Serve, hold

QUESTIONS = [Question(str(i), ({"role": "user", "content": f"say {i} again"},), "chat") for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
AT_ONCE = [Arrival(0.0, QUESTIONS[0], GREEDY)] * 4


def find(running: Running, key: str = "") -> Server:
    return find_server(running.url, None, key, "THE_KEY")


def test_every_answer_is_seen_as_its_client_sees_it(served: Running) -> None:
    server = find(served)
    load = poisson_load(QUESTIONS, GREEDY, rate=100.0, seconds=0.1, seed=0)
    done: list[int] = []
    record = drive_server(server, load, WAIT_S, on_progress=done.append)
    assert (record.failed, len(record.requests)) == (0, len(load))
    assert done[-1] == len(load) > 3
    by_id = {request.id: request for request in record.requests}
    for place, arrival in enumerate(load):
        seen = by_id[f"load-{place}"]
        alone = served.chat(arrival.prompt.messages[0]["content"], max_tokens=12, ignore_eos=True).json()
        assert seen.output_tokens == 12
        assert seen.prompt_tokens == alone["usage"]["prompt_tokens"]
        assert seen.arrived_s == arrival.at_s <= seen.first_token_s <= seen.finished_s <= record.seconds
        assert (seen.proposed, seen.accepted) != (None, None)
    drafted = sum(request.proposed or 0 for request in record.requests)
    accepted = sum(request.accepted or 0 for request in record.requests)
    assert record.acceptance == pytest.approx(accepted / drafted), "the server's counters say the same"


def test_a_full_server_is_counted_not_asked_again(serve: Serve) -> None:
    running = serve(max_queue=0, engine={"max_slots": 1})
    server, release = find(running), hold(running)
    record = drive_server(server, AT_ONCE, WAIT_S, on_progress=lambda done: release.set() if done == 3 else None)
    assert len(record.requests) == 1
    assert record.errors == {"429 queue_full": 3}
    assert record.failed == 3


def test_an_answer_that_takes_too_long_has_failed(serve: Serve) -> None:
    running = serve()
    server, release = find(running), hold(running)
    record = drive_server(server, AT_ONCE[:2], 0.2)
    release.set()
    assert record.errors == {"no whole answer within 0.2 s": 2}
    assert record.requests == ()


def test_a_server_that_is_gone_is_counted() -> None:
    record = drive_server(Server("http://127.0.0.1:9", "http://127.0.0.1:9/v1", "tiny"), AT_ONCE, WAIT_S)
    assert record.errors == {"the connection failed: ConnectError": 4}


@pytest.mark.parametrize(
    ("path", "model", "said"),
    [
        ("", "gpt-4", r"it has no model gpt-4; model= may be tiny"),
        ("/health", None, r"/health/v1/models is no list of models \(status 404\)"),
        ("/v1/models/tiny", None, "is no list of models"),
    ],
)
def test_what_is_not_there_is_named(served: Running, path: str, model: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_server(served.url + path, model, "", "THE_KEY")


def test_keys_are_wanted_refused_and_never_shown(guarded: Running) -> None:
    with pytest.raises(ConfigError, match=r"it wants an API key; put it into THE_KEY \(401\)"):
        find(guarded)
    with pytest.raises(ConfigError, match=r"the key in THE_KEY is refused \(401\)") as refusal:
        find(guarded, "wrong-api-key")
    assert "wrong-api-key" not in str(refusal.value)
    server = find(guarded, API_KEY)
    assert server.model == "tiny"
    assert API_KEY not in repr(server)
    assert drive_server(server, AT_ONCE, WAIT_S).failed == 0


def test_counters_of_other_engines() -> None:
    vllm = 'vllm:spec_decode_num_draft_tokens_total{engine="%d"} %s\nvllm:spec_decode_num_accepted_tokens_total %s\n'
    before, after = (counts_in(vllm % (0, drafted, accepted)) for drafted, accepted in (("10.0", "4.0"), ("3e1", "9")))
    assert after.rate_since(before) == 0.25
    assert after.rate_since(after) is None, "nothing was drafted in between"
    two = counts_in("".join(vllm % (engine, "5.0", "2.0") for engine in (0, 1)))
    assert (two.drafted, two.accepted) == (10.0, 4.0)
    sglang = counts_in('sglang:spec_accept_rate{tp_rank="0"} 0.6\nsglang:spec_accept_length 2.8\n')
    assert sglang.rate_since(SpeculationCounts()) == 0.6
    assert counts_in("# HELP nothing\n").rate_since(SpeculationCounts()) is None


def events(*lines: Any) -> AnswerStream:
    """An answer read from events, a second apart."""
    answer = AnswerStream()
    for second, line in enumerate(lines):
        answer.read(line if isinstance(line, str) else f"data: {json.dumps(line)}", float(second))
    return answer


def piece(text: str | None, finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text, **delta}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}


def test_a_stream_of_vllms_is_read() -> None:
    answer = events(piece(""), "", ": ping", piece(None, reasoning_content="so"), piece("a"), piece("", "stop"), USAGE)
    answer.read("data: [DONE]", 9.0)
    answer.check_whole()
    assert (answer.first_s, answer.last_s) == (3.0, 5.0), "who speaks is no token; what comes after the end no text"
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 5)
    assert (answer.proposed, answer.accepted) == (None, None)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((piece("a"), {"error": {"message": "out of memory", "code": 500}}), "in the stream: 500"),
        ((piece("a"), {"error": "gone"}), "in the stream: gone"),
        ((piece("a"), "data: {"), "no JSON"),
        ((piece("a"), USAGE), "broke off"),
        ((piece("a", "stop"),), "no usage in the stream"),
        ((), "broke off"),
    ],
)
def test_half_an_answer_is_none(lines: tuple[Any, ...], said: str) -> None:
    with pytest.raises(StreamFailed, match=said):
        events(*lines).check_whole()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, b'{"error": {"code": "queue_full", "type": "x", "message": "3 answers wait"}}', "429 queue_full"),
        (400, b'{"error": {"code": null, "type": "invalid_request_error"}}', "400 invalid_request_error"),
        (502, b"<html>Bad gateway", "502"),
        (404, b"[]", "404"),
    ],
)
def test_refusals_are_counted_by_status_and_code(status: int, body: bytes, said: str) -> None:
    assert str(StreamFailed.refused(status, body)) == said
