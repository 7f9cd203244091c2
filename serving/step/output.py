"""Result of one engine step."""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import RequestOutput, SequenceDelta


@dataclass(frozen=True)
class StepOutput:
    """New text by answer, and the requests that finished."""

    deltas: tuple[SequenceDelta, ...] = ()
    finished: tuple[RequestOutput, ...] = ()
    result: StepResult | None = None  # None if there was nothing to run
