"""OpenTelemetry spans of generations, where the library is installed and they are asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distillspec.errors import ConfigError


class Tracing:
    """Spans named `generate` with OpenTelemetry's `gen_ai.*` attributes; does nothing where it is off.

    Where spans go is the library's business: `opentelemetry-instrument distill serve …`, and its OTEL_* variables.
    """

    def __init__(self, on: bool) -> None:
        self._tracer: Any = _tracer() if on else None

    @contextmanager
    def span(self, **attributes: Any) -> Iterator[dict[str, Any]]:
        """A span around a generation; what is put into the dictionary becomes attributes at the end."""
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
