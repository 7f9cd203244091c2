"""Answers of one HTTP request on their way to the client, merged until they are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.requests import Request, RequestOutput, SequenceDelta, TokenLogprob
from distillspec.serving.server.http.errors import ApiError

Kind = Literal["accepted", "corrected", "bonus", "plain"]


@dataclass(frozen=True)
class Delta:
    """New tokens and text of one answer since the last read.

    Attributes:
        kinds: of each token.
        sources: who proposed each token, "" for those that nobody did.
    """

    choice: int
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    error: str | None
    sources: tuple[str, ...] = ()

    def and_then(self, later: Delta) -> Delta:
        """Return this delta and a later one of the same answer as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            kinds=self.kinds + later.kinds,
            sources=self.sources + later.sources,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
        )


@dataclass(slots=True)
class _Unread:
    """Tokens and text of an answer since the last read. Lists: joining tuples would copy everything at every step."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def add(self, output: SequenceDelta, row: RowResult | None) -> None:
        self.token_ids += output.token_ids
        self.kinds += kinds(len(output.token_ids), row)
        self.sources += sources(len(output.token_ids), row)
        self.texts.append(output.text)
        self.logprobs += output.logprobs
        self.finish_reason, self.error = output.finish_reason, output.error

    def read(self, choice: int) -> Delta:
        return Delta(
            choice,
            tuple(self.token_ids),
            tuple(self.kinds),
            "".join(self.texts),
            tuple(self.logprobs),
            self.finish_reason,
            self.error,
            tuple(self.sources),
        )


class RequestStream:
    """Mailbox of one HTTP request, which may be several engine requests. Used on the event loop alone.

    A slow reader finds everything since its last read merged into one delta per answer, so memory is bounded by the
    tokens of the answers.
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
        # What was written so far, for the log: a client that leaves has been served, too.
        self.written = self.proposed = self.accepted = 0
        self.first_token_s: float | None = None  # on the monotonic clock
        self._unread: dict[int, _Unread] = {}  # by choice
        self._failure: ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """True when every answer is finished. Unread deltas may be left."""
        return len(self.outputs) == len(self.requests)

    @property
    def ended(self) -> bool:
        """True when every answer is finished, or none will be any more."""
        return self.done or self._failure is not None

    def put(self, output: SequenceDelta, row: RowResult | None) -> None:
        """Add the new tokens of an answer. `row` is its part of the step, None if it had none."""
        self._count(output, row)
        choice = self._first[output.request_id] + output.index
        if (unread := self._unread.get(choice)) is None:
            unread = self._unread[choice] = _Unread()
        unread.add(output, row)
        self._changed.set()

    def _count(self, output: SequenceDelta, row: RowResult | None) -> None:
        if output.token_ids and self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.written += len(output.token_ids)
        if row is not None:
            self.proposed += row.nodes
            self.accepted += row.kept

    def finish(self, output: RequestOutput) -> None:
        """Note that an engine request has all its answers."""
        self.outputs[output.request_id] = output
        self._changed.set()

    def fail(self, failure: ApiError) -> None:
        """End the stream. The reader gets `failure` after the unread deltas."""
        self._failure = failure
        self._changed.set()

    async def take(self) -> list[Delta]:
        """Wait for deltas and return them. An empty list means that all answers are finished and read.

        Raises:
            ApiError: the answers were aborted.
        """
        while not self._unread:
            if self.done:
                return []
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        unread, self._unread = self._unread, {}
        return [answer.read(choice) for choice, answer in unread.items()]


def kinds(tokens: int, row: RowResult | None) -> tuple[Kind, ...]:
    """Return the kind of each token of a step: the accepted ones first, then the target's own one.

    The target's token is a correction if a drafted token was rejected, a bonus if all were accepted, plain if none was
    drafted. There is no such token if the answer ended with an accepted one.
    """
    drafted: Kind = "accepted"
    last: Kind = "plain"
    accepted = 0
    if row is not None and row.nodes:
        accepted, last = min(row.accepted, tokens), "corrected" if row.rejected else "bonus"
    return (drafted,) * accepted + (last,) * (tokens - accepted)


def sources(tokens: int, row: RowResult | None) -> tuple[str, ...]:
    """Return who proposed each token of a step, "" for the target's own one."""
    drafted_by = [] if row is None else [trial.source for trial in row.trials if trial.accepted][:tokens]
    return (*drafted_by, *[""] * (tokens - len(drafted_by)))
