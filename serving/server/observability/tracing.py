"""OpenTelemetry spans of generations, with `server.tracing=true`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distillspec.errors import ConfigError


class Tracing:
    """Spans named `generate` with OpenTelemetry's `gen_ai.*` attributes. Does nothing when off.

    `opentelemetry-instrument distill serve …` and the OTEL_* variables configure the export.
    """

    def __init__(self, on: bool) -> None:
        self._tracer: Any = _tracer() if on else None

    @contextmanager
    def span(self, **attributes: Any) -> Iterator[dict[str, Any]]:
        """Open a span around a generation. The entries of the yielded dictionary become attributes at its end."""
        later: dict[str, Any] = {}
        if self._tracer is None:
            yield later
            return
        span = self._tracer.start_span("generate", attributes=attributes)
        try:
            yield later
        finally:
            span.set_attributes({name: value for name, value in later.items() if value is not None})
            span.end()


def _tracer() -> Any:
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError("server.tracing=true needs OpenTelemetry: pip install opentelemetry-distro[otlp]")
    from opentelemetry import trace

    return trace.get_tracer("distillspec")
