"""Reading a request's stream: a slow reader gets every token once, merged, and then the failure."""

from __future__ import annotations

import asyncio

import pytest

from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.requests import RequestOutput, SequenceDelta
from distillspec.serving.server.bridge.request_stream import RequestStream, kinds, sources
from distillspec.serving.server.http.errors import ApiError


def output_delta(request: str, index: int, *tokens: int, finish: str | None = None) -> SequenceDelta:
    return SequenceDelta(request, index, tokens, "".join(map(chr, tokens)), finish_reason=finish)  # type: ignore[arg-type]


def test_a_slow_reader_gets_one_delta_an_answer() -> None:
    stream = RequestStream([Request("a", (1,), SamplingParams(n=2)), Request("b", (1,))])
    for token in range(65, 91):
        stream.put(output_delta("a", 1, token), RowResult.chain("a/1", 0, 0, 1))
        stream.put(output_delta("b", 0, token), None)
    taken = asyncio.run(stream.take())
    assert len(taken) == 2
    deltas = {delta.choice: delta for delta in taken}
    assert sorted(deltas) == [1, 2]
    assert deltas[1].text == deltas[2].text == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert deltas[1].token_ids == tuple(range(65, 91))
    assert deltas[1].kinds == deltas[2].kinds == ("plain",) * 26
    assert deltas[1].finish_reason is None
    stream.put(output_delta("b", 0, 66), RowResult.chain("b/0", 2, 0, 1))
    stream.put(output_delta("b", 0, 65, finish="length"), RowResult.chain("b/0", 1, 1, 1))
    (last,) = asyncio.run(stream.take())
    assert (last.text, last.kinds, last.finish_reason) == ("BA", ("corrected", "accepted"), "length")
    stream.fail(ApiError(503, "nothing is left"))
    with pytest.raises(ApiError, match="nothing is left"):
        asyncio.run(stream.take())


def test_a_failure_comes_after_what_was_written() -> None:
    stream = RequestStream([Request("a", (1,))])
    stream.put(output_delta("a", 0, 65), None)
    stream.fail(ApiError(503, "gone"))
    assert [delta.text for delta in asyncio.run(stream.take())] == ["A"]
    with pytest.raises(ApiError, match="gone"):
        asyncio.run(stream.take())


def test_an_answer_that_was_finished_before_a_failure_is_whole() -> None:
    stream = RequestStream([Request("a", (1,))])
    stream.put(output_delta("a", 0, 65, finish="length"), None)
    stream.finish(RequestOutput("a", (1,), ()))
    assert stream.ended
    stream.fail(ApiError(503, "gone"))
    assert [delta.text for delta in asyncio.run(stream.take())] == ["A"]
    assert asyncio.run(stream.take()) == []


@pytest.mark.parametrize(
    ("row", "tokens", "expected"),
    [
        (None, 2, ("plain", "plain")),
        (RowResult.chain("x", 0, 0, 1), 1, ("plain",)),
        (RowResult.chain("x", 3, 1, 2), 2, ("accepted", "corrected")),
        (RowResult.chain("x", 3, 3, 4), 4, ("accepted", "accepted", "accepted", "bonus")),
        (RowResult.chain("x", 3, 3, 2), 2, ("accepted", "accepted")),  # it stopped among the accepted ones
        (RowResult.chain("x", 3, 0, 0), 0, ()),
    ],
)
def test_where_tokens_come_from(row: RowResult | None, tokens: int, expected: tuple[str, ...]) -> None:
    assert kinds(tokens, row) == expected
    assert sources(tokens, row) == tuple("draft" if kind == "accepted" else "" for kind in expected)


def test_what_was_written_is_counted_before_an_answer_ends() -> None:
    stream = RequestStream([Request("a", (1,), SamplingParams(n=2))])
    assert stream.first_token_s is None
    stream.put(output_delta("a", 0, 65, 66, 67), RowResult.chain("a/0", 4, 2, 3))
    stream.put(output_delta("a", 1, 68), None)
    assert (stream.written, stream.proposed, stream.accepted) == (4, 4, 2)
    assert stream.first_token_s is not None
