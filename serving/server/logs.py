"""Log lines with request ids: JSON for machines, or text. Prompts, answers and keys are never in them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
access = logging.getLogger("distillspec.serving.server.access")


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
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = {"request_id": REQUEST_ID.get(), **getattr(record, "fields", {})}
        return super().format(record) + "".join(f" {k}={v}" for k, v in fields.items() if v is not None)


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
