"""Log lines with request ids: JSON for machines, or text. Prompts, answers and keys are never in them.

Clients choose some of what is logged (`user`, names in messages, texts of errors): none of it can begin a line, add a
field, or steer a terminal.
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
access = logging.getLogger("distillspec.serving.server.access")
PLAIN = re.compile(r"[\w.:/+@%-]+", re.ASCII)  # a value that needs no quotes


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request id, and what `extra={"fields": …}` adds."""

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
    """The same for people: `name=value`, what is not plain quoted as JSON strings; tracebacks indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = _printable(f"{self.formatTime(record)} {record.levelname:<7} {record.getMessage()}")
        fields = {"request_id": REQUEST_ID.get(), **getattr(record, "fields", {})}
        line += "".join(f" {name}={_quoted(value)}" for name, value in fields.items() if value is not None)
        if record.exc_info:
            line += "".join(f"\n  {_printable(part)}" for part in self.formatException(record.exc_info).split("\n"))
        return line


def _quoted(value: Any) -> str:
    """A field's value; one that could be taken for something else is a JSON string, in ASCII."""
    text = str(value)
    return text if PLAIN.fullmatch(text) else _as_json(text)


def _as_json(value: Any) -> str:
    """JSON of printable ASCII letters alone."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    """The text with line breaks, escape codes and the like spelt out."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


@contextmanager
def logging_to_stderr(log_format: str) -> Iterator[None]:
    """Inside the block the project's and uvicorn's lines go to stderr in one format, and nowhere else."""
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
