"""One request of a simulation: its acceptance under each draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distillspec.serving.simulation.acceptance_trace import AcceptanceTrace


class DraftRow(NamedTuple):
    """One request's acceptance trace of a draft in the form that steps read, by place in its output."""

    runs: list[int]
    gates: list[int] | None
    ranks: list[int]


class SimulatedRow(NamedTuple):
    """One request's traces, by draft."""

    prompt_tokens: int
    drafts: dict[str, DraftRow]

    @classmethod
    def of(
        cls, prompt_tokens: int, traces: Mapping[str, AcceptanceTrace], confidence_threshold: float | None
    ) -> SimulatedRow:
        """Return the row of a request whose draft stops at or below a confidence, None: never."""
        drafts = {
            source: DraftRow(
                trace.runs,
                None if confidence_threshold is None else trace.confident_runs(confidence_threshold),
                trace.ranks,
            )
            for source, trace in traces.items()
        }
        return cls(prompt_tokens, drafts)
