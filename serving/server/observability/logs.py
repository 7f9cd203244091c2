"""Log lines with request ids, as JSON or text. They never contain prompts, answers or keys.

Clients choose some logged values (`user`, names in messages, texts of errors). None of these can begin a line, add a
field or send escape codes to a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
access = logging.getLogger("distillspec.serving.server.access")  # a name that log filters know, not a module
PLAIN = re.compile(r"[\w.:/+@%-]+", re.ASCII)  # a value that needs no quotes


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request id and the fields of `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _as_json(line)


class TextLines(logging.Formatter):
    """Readable lines with fields as `name=value`. Values that are not plain are JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        line = _printable(f"{self.formatTime(record)} {record.levelname:<7} {record.getMessage()}")
        fields = {"request_id": REQUEST_ID.get(), **getattr(record, "fields", {})}
        line += "".join(f" {name}={_quoted(value)}" for name, value in fields.items() if value is not None)
        if record.exc_info:
            line += "".join(f"\n  {_printable(part)}" for part in self.formatException(record.exc_info).split("\n"))
        return line


def _quoted(value: Any) -> str:
    """Return a field's value. Anything but plain ASCII becomes a JSON string."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else _as_json(text)


def _as_json(value: Any) -> str:
    """Return JSON of printable ASCII characters."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    """Return the text with line breaks, escape codes and other unprintable characters escaped."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


@contextmanager
def logging_to_stderr(log_format: str) -> Iterator[None]:
    """Send the project's and uvicorn's lines to stderr in one format, and nowhere else, inside the block."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    chosen = [(logging.getLogger("distillspec"), logging.INFO), (logging.getLogger("uvicorn"), logging.WARNING)]
    before = [(logger.handlers, logger.propagate, logger.level) for logger, _ in chosen]
    for logger, level in chosen:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    try:
        yield
    finally:
        for (logger, _), (handlers, propagate, level) in zip(chosen, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
