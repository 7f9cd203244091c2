"""Load: arrivals of a Poisson process, the same for every side of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy

from distillspec.errors import ConfigError
from distillspec.serving.base.params import SamplingParams


@dataclass(frozen=True)
class Question:
    """Messages for a server, which applies its own chat template."""

    id: str
    messages: tuple[dict[str, str], ...]
    domain: str = "default"

    @classmethod
    def of(cls, id_: str, content: Any, domain: str) -> Question:
        """Ask what a row of a prompts file holds: a text, or messages."""
        messages = ({"role": "user", "content": content},) if isinstance(content, str) else tuple(content)
        return cls(id_, messages, domain)


P = TypeVar("P")  # Prompt for the engine, Question for a server


@dataclass(frozen=True)
class Arrival(Generic[P]):
    """A request and its time, in seconds from the start of the load."""

    at_s: float
    prompt: P
    params: SamplingParams


def poisson_load(
    prompts: Sequence[P], params: SamplingParams, rate: float, seconds: float, seed: int
) -> list[Arrival[P]]:
    """Draw a Poisson load of `rate` requests a second over `seconds`, at least one request.

    Prompts are in random order. Every prompt comes once before any comes again.

    Raises:
        ConfigError: there are no prompts, or rate or time is not above 0.
    """
    if not prompts:
        raise ConfigError("there are no prompts to send")
    for name, value in (("rate", rate), ("seconds", seconds)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value} must be above 0")
    random = numpy.random.default_rng(seed)
    times = [float(random.exponential(1 / rate))]
    while (later := times[-1] + float(random.exponential(1 / rate))) < seconds:
        times.append(later)
    order = [int(i) for _ in range(-(-len(times) // len(prompts))) for i in random.permutation(len(prompts))]
    return [Arrival(at, prompts[i], params) for at, i in zip(times, order, strict=False)]
