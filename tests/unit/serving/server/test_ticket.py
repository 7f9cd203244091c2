"""What a slow reader finds: everything once, merged, and told why where it ended early."""

from __future__ import annotations

import asyncio

import pytest

from distillspec.serving import Request, SamplingParams
from distillspec.serving.control.base import RowResult
from distillspec.serving.requests import SequenceDelta
from distillspec.serving.server.errors import ApiError
from distillspec.serving.server.ticket import Ticket, kinds


def delta(request: str, index: int, *tokens: int, finish: str | None = None) -> SequenceDelta:
    return SequenceDelta(request, index, tokens, "".join(map(chr, tokens)), finish_reason=finish)  # type: ignore[arg-type]


def test_a_slow_reader_holds_one_gain_an_answer() -> None:
    ticket = Ticket([Request("a", (1,), SamplingParams(n=2)), Request("b", (1,))])
    for token in range(65, 91):
        ticket.put(delta("a", 1, token), RowResult("a/1", 0, 0, 1))
        ticket.put(delta("b", 0, token), None)
    assert len(ticket._pending) == 2
    gains = {gain.choice: gain for gain in asyncio.run(ticket.take())}
    assert sorted(gains) == [1, 2]
    assert gains[1].text == gains[2].text == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert gains[1].token_ids == tuple(range(65, 91))
    assert ticket._pending == {}


def test_a_failure_comes_after_what_was_written() -> None:
    ticket = Ticket([Request("a", (1,))])
    ticket.put(delta("a", 0, 65), None)
    ticket.fail(ApiError(503, "gone"))
    assert [gain.text for gain in asyncio.run(ticket.take())] == ["A"]
    with pytest.raises(ApiError, match="gone"):
        asyncio.run(ticket.take())


@pytest.mark.parametrize(
    ("row", "tokens", "expected"),
    [
        (None, 2, ("plain", "plain")),
        (RowResult("x", 0, 0, 1), 1, ("plain",)),
        (RowResult("x", 3, 1, 2), 2, ("accepted", "corrected")),
        (RowResult("x", 3, 3, 4), 4, ("accepted", "accepted", "accepted", "bonus")),
        (RowResult("x", 3, 3, 2), 2, ("accepted", "accepted")),  # it stopped among the accepted ones
        (RowResult("x", 3, 0, 0), 0, ()),
    ],
)
def test_where_tokens_come_from(row: RowResult | None, tokens: int, expected: tuple[str, ...]) -> None:
    assert kinds(tokens, row) == expected
