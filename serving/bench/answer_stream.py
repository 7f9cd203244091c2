"""A streamed chat completion read line by line: when text came, how many tokens it was, what was drafted."""

from __future__ import annotations

import json
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning")  # of a delta: the answer, and what reasoning models write first


class StreamFailed(Exception):
    """An answer that is none; the message names the status and code, short enough to be counted by."""

    @classmethod
    def refused(cls, status: int, body: bytes) -> StreamFailed:
        """From a response that is no 200."""
        try:
            said = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return cls(str(status))
        return cls(f"{status} {_reason(said)}".strip())


class AnswerStream:
    """What the lines of server-sent events say so far.

    `first_s` and `last_s` are when the first and the last piece came, in the reader's clock; an answer without any
    visible text counts from its end. `proposed` and `accepted` are None where the server does not tell.
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.prompt_tokens = self.output_tokens = 0
        self.proposed: int | None = None
        self.accepted: int | None = None
        self._counted = self._finished = False

    def read(self, line: str, now_s: float) -> None:
        """A line of the stream.

        Raises:
            StreamFailed: an error event, or a line that is no event.
        """
        if not line.startswith("data:") or line == "data: [DONE]":
            return
        try:
            event = json.loads(line[5:])
        except ValueError:
            raise StreamFailed("the stream holds no JSON") from None
        if "error" in event:
            raise StreamFailed(f"in the stream: {_reason(event['error'])}")
        for choice in event.get("choices") or ():
            self._read_choice(choice, now_s)
        if usage := event.get("usage"):
            self._counted = True
            self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if told := event.get("speculation"):
            self.proposed, self.accepted = told["proposed"], told["accepted"]

    def check_whole(self) -> None:
        """Raises StreamFailed for a stream that broke off, or whose length nobody told."""
        if not self._finished:
            raise StreamFailed("the stream broke off")
        if not self._counted:
            raise StreamFailed("no usage in the stream: the server does not honour stream_options.include_usage")

    def _read_choice(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta") or {}
        ends = choice.get("finish_reason") is not None
        self._finished = self._finished or ends
        if ends or any(delta.get(name) for name in TEXTS):
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s


def _reason(said: Any) -> str:
    """The code of an error, else its type: messages name values, and could not be counted."""
    if isinstance(said, dict):
        return str(said.get("code") or said.get("type") or "")[:80]
    return str(said)[:80]
