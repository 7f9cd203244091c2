"""Requests to simulate: drawn from distributions, or recorded."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from distillspec.config.simulation import WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.simulation.acceptance_trace import AcceptanceTrace, draw_acceptance_trace

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SimulatedRequest:
    """One request: arrival, lengths, and the acceptance trace of its drafted tokens."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    trace: AcceptanceTrace
    traces: Mapping[str, AcceptanceTrace] = field(default_factory=dict)  # of each of several drafts
    domain: str = "default"

    @property
    def by_draft(self) -> Mapping[str, AcceptanceTrace]:
        """The trace of each draft, by source."""
        return self.traces or {DRAFT: self.trace}


@dataclass(frozen=True)
class TraceLine:
    """One line of a trace file. `alpha` is optional."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    alpha: float | None = None


def make_workload(config: WorkloadConfig, rate: float | None = None, seed: int = 0) -> list[SimulatedRequest]:
    """Return requests in order of arrival, `rate` a second or at the times of a trace file.

    The same seed gives the same requests and acceptance at every rate. Only the gaps between arrivals shrink.

    Raises:
        ConfigError: the rate is not finite and above 0, or the trace cannot be read.
    """
    if config.trace is not None:
        lines = read_trace(Path(config.trace), config.requests)
    elif rate is None or not 0 < rate < float("inf"):
        raise ConfigError(f"rate={rate} must be finite and above 0 arrivals a second")
    else:
        lines = _poisson(config, rate, seed)
    return [_request(config, line, place, len(lines), seed) for place, line in enumerate(lines)]


def read_trace(path: Path, most: int | None = None) -> list[TraceLine]:
    """Read the first `most` requests of a JSONL file: `arrival_s`, `prompt_tokens`, `output_tokens`, optional `alpha`.

    Raises:
        ConfigError: there is no such file, it is empty, or a line is not a request. Names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.trace={path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    lines = [_trace_line(f"{path}:{number}", line) for number, line in numbered[:most]]
    if len(lines) < len(numbered):
        log.warning(
            "%s: the first %d requests of %d are simulated; workload.requests=%d takes all",
            path,
            len(lines),
            len(numbered),
            len(numbered),
        )
    if not lines:
        raise ConfigError(f"workload.trace={path} is empty; it needs a request a line")
    return sorted(lines, key=lambda line: line.arrival_s)


def _trace_line(place: str, text: str) -> TraceLine:
    try:
        stored: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error})") from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{place}: {text.strip()[:40]} is no object with arrival_s, prompt_tokens and output_tokens")
    arrival_s = _number(place, stored, "arrival_s", 0.0)
    prompt, output = (_number(place, stored, name, 1) for name in ("prompt_tokens", "output_tokens"))
    alpha = _number(place, stored, "alpha", 0.0, most=1.0) if stored.get("alpha") is not None else None
    return TraceLine(arrival_s, int(prompt), int(output), alpha)


def _number(place: str, stored: dict[str, Any], name: str, least: float, most: float = 1e12) -> float:
    value = stored.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(
            f"{place}: {name}={value} must be a number of at least {least}" + f" and at most {most}" * (most < 1e12)
        )
    return float(value)


def _poisson(config: WorkloadConfig, rate: float, seed: int) -> list[TraceLine]:
    random = numpy.random.default_rng([seed, 0])
    count = config.requests
    arrivals = numpy.cumsum(random.exponential(1.0, count)) / rate
    prompts = _lengths(config.prompt_tokens, config.prompt_spread, count, random)
    outputs = _lengths(config.output_tokens, config.output_spread, count, random)
    return [TraceLine(*line) for line in zip(arrivals.tolist(), prompts, outputs, strict=True)]


def _lengths(mean: float, spread: float, count: int, random: numpy.random.Generator) -> list[int]:
    """Draw lognormal lengths of the given mean, cut at eight means so that one request is not the whole load."""
    drawn = mean * numpy.exp(spread * random.standard_normal(count) - spread**2 / 2)
    lengths: list[int] = numpy.rint(drawn).clip(1, 8 * mean).astype(int).tolist()
    return lengths


def _request(config: WorkloadConfig, line: TraceLine, place: int, count: int, seed: int) -> SimulatedRequest:
    change = config.drift * (place / max(count - 1, 1) - 0.5)

    def trace(alpha: float, *key: int) -> AcceptanceTrace:
        random = numpy.random.default_rng([seed, 1, place, *key])
        return draw_acceptance_trace(config, min(max(alpha, 0.0), 1.0), line.output_tokens, random)

    only_draft = trace(config.alpha + change if line.alpha is None else line.alpha)
    domain, alphas = "default", dict[str, float]()
    if config.alphas:
        domain = sorted(config.alphas)[int(numpy.random.default_rng([seed, 2, place]).integers(len(config.alphas)))]
        alphas = config.alphas[domain]
    traces = {draft: trace(alpha + change, 1 + number) for number, (draft, alpha) in enumerate(sorted(alphas.items()))}
    lengths = line.prompt_tokens, line.output_tokens
    return SimulatedRequest(f"r{place}", line.arrival_s, *lengths, only_draft, traces, domain)


def check_fits(requests: Sequence[SimulatedRequest], longest: int) -> None:
    """Raise ConfigError for a request of more than `longest` tokens."""
    for request in requests:
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > longest:
            raise ConfigError(
                f"request {request.id}: {request.prompt_tokens} + {request.output_tokens} tokens do not fit {longest} "
                "(hardware.max_len, hardware.cache_tokens)"
            )
