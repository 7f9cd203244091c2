"""Spans of generations, with OpenTelemetry's own library in memory."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.server.observability import tracing
from distillspec.serving.server.observability.tracing import Tracing

from ..conftest import Serve


def test_a_generation_is_a_span(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    processors = pytest.importorskip("opentelemetry.sdk.trace.export")
    kept: Any = export.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(processors.SimpleSpanProcessor(kept))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda name: provider.get_tracer(name))
    running = serve(tracing=True)
    body = running.complete(max_tokens=5).json()
    running.complete(tempratur=1)
    running.wait_until_idle()
    (span,) = kept.get_finished_spans()
    assert span.name == "generate"
    assert dict(span.attributes) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": body["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "distillspec.outcome": "done",
    }
    assert span.end_time > span.start_time


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install opentelemetry"):
        Tracing(True)
    Tracing(False)
