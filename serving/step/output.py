"""Result of one engine step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import RequestOutput, SequenceDelta
from distillspec.serving.sequences.detokenize import Detokenizer


@dataclass(frozen=True)
class StepOutput:
    """New text by answer, and the requests that finished.

    `unwritten`: index of a delta → the detokenizer that still owes it text (`written`). Empty unless an engine has work
    for `meanwhile`.
    """

    deltas: tuple[SequenceDelta, ...] = ()
    finished: tuple[RequestOutput, ...] = ()
    result: StepResult | None = None  # None if there was nothing to run
    unwritten: Mapping[int, Detokenizer] = field(default_factory=dict)

    def written(self) -> StepOutput:
        """Return the output with all its text. To be called in the order of steps, in the thread that steps."""
        if not self.unwritten:
            return self
        deltas = list(self.deltas)
        for index, detokenizer in self.unwritten.items():
            deltas[index] = replace(deltas[index], text=deltas[index].text + detokenizer.catch_up())
        return replace(self, deltas=tuple(deltas), unwritten={})
