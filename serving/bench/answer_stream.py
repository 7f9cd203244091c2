"""Reader of a streamed chat completion: times of its text, numbers of tokens, drafted and accepted tokens."""

from __future__ import annotations

import json
from typing import Any

TEXTS = ("content", "reasoning_content", "reasoning")  # of a delta: the answer, and what reasoning models write first


class StreamFailed(Exception):
    """An answer that failed. The message has status and code alone, so that failures can be counted by it."""

    @classmethod
    def refused(cls, status: int, body: bytes) -> StreamFailed:
        """Return the failure of a response whose status is not 200."""
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return cls(str(status))
        return cls(f"{status} {_reason(error)}".strip())


class AnswerStream:
    """State of one answer after the server-sent events so far.

    `first_s` and `last_s` are the times of the first and the last text, in the reader's clock. An answer without text
    has the time of its end. `proposed` and `accepted` are None where the server does not report them.
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.prompt_tokens = self.output_tokens = 0
        self.proposed: int | None = None
        self.accepted: int | None = None
        self._counted = self._finished = False

    def read(self, line: str, now_s: float) -> None:
        """Read one line of the stream.

        Raises:
            StreamFailed: the line is an error event, or not JSON.
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
        if speculation := event.get("speculation"):
            self.proposed, self.accepted = speculation["proposed"], speculation["accepted"]

    def check_whole(self) -> None:
        """Raise StreamFailed if the stream broke off, or reported no numbers of tokens."""
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


def _reason(error: Any) -> str:
    """Return the code of an error, else its type. Messages contain values, so failures could not be counted by them."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "")[:80]
    return str(error)[:80]
