"""The answers of one HTTP request on their way out: what came, merged until somebody takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from distillspec.serving.control.base import RowResult
from distillspec.serving.requests import Request, RequestOutput, SequenceDelta, TokenLogprob
from distillspec.serving.server.errors import ApiError

Kind = Literal["accepted", "corrected", "bonus", "plain"]


@dataclass(frozen=True)
class Gain:
    """What one answer gained since it was last looked at; `kinds` says of each token where it came from."""

    choice: int
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    error: str | None

    def and_then(self, later: Gain) -> Gain:
        """Both as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            kinds=self.kinds + later.kinds,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
        )


class Ticket:
    """The mailbox of one HTTP request with one or more engine requests; lives on the event loop.

    A reader that is slow finds everything since its last look merged into one gain an answer: the tokens of the
    answers, and nothing more, are all that is ever held.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.tenant = self.requests[0].tenant
        self._first = {}
        answers = 0
        for request in requests:
            self._first[request.id] = answers
            answers += request.params.n
        self.answers = answers
        self.outputs: dict[str, RequestOutput] = {}
        self._pending: dict[int, Gain] = {}
        self._failure: ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """Every answer is finished; there may be gains to take still."""
        return len(self.outputs) == len(self.requests)

    def put(self, delta: SequenceDelta, row: RowResult | None) -> None:
        """Leave what an answer gained."""
        gain = Gain(
            self._first[delta.request_id] + delta.index,
            delta.token_ids,
            kinds(len(delta.token_ids), row),
            delta.text,
            delta.logprobs,
            delta.finish_reason,
            delta.error,
        )
        before = self._pending.get(gain.choice)
        self._pending[gain.choice] = gain if before is None else before.and_then(gain)
        self._changed.set()

    def finish(self, output: RequestOutput) -> None:
        """A request has all its answers."""
        self.outputs[output.request_id] = output
        self._changed.set()

    def fail(self, failure: ApiError) -> None:
        """Nothing more will come; the reader is told why."""
        self._failure = failure
        self._changed.set()

    async def take(self) -> list[Gain]:
        """Wait for gains; an empty list means that everything was taken.

        Raises:
            ApiError: the answers were cut off.
        """
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            if self.done:
                return []
            self._changed.clear()
            await self._changed.wait()
        gains = list(self._pending.values())
        self._pending = {}
        return gains


def kinds(tokens: int, row: RowResult | None) -> tuple[Kind, ...]:
    """Of each token of a step: accepted drafts first, then one of the target's own.

    The last token is a correction where a drafted one was refused, a bonus where all stood, plain where none was
    drafted; where an answer ended among the accepted ones, there is none.
    """
    accepted = 0 if row is None else min(row.accepted, tokens)
    own: Kind = "plain"
    if row is not None and row.proposed:
        own = "corrected" if row.accepted < row.depth else "bonus"
    stood: Kind = "accepted"
    return tuple(stood if place < accepted else own for place in range(tokens))
