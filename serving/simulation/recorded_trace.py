"""Requests of a live run for the simulator: the same arrivals, lengths and acceptance (SmartSpec's Fig. 13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy

from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.wrapped import WrappedController
from distillspec.serving.bench.records import RequestRecord
from distillspec.serving.simulation.acceptance_trace import NEVER, AcceptanceTrace
from distillspec.serving.simulation.workload import SimulatedRequest

SHARED_TRIALS = 10.0  # weight of the acceptance over all requests, in trials of a request's own

# Sequence → tokens before the drafted ones → the rank of the accepted one, the first is 1. NEVER if all were rejected.
Trials = Mapping[str, Mapping[int, int]]


class AcceptanceRecorder(WrappedController):
    """Wrapper of a controller that records every step, and which drafted tokens were accepted."""

    def __init__(self, inside: LengthController) -> None:
        super().__init__(inside)
        self.results: list[StepResult] = []
        self.trials: dict[str, dict[int, int]] = {}

    def observe(self, result: StepResult) -> None:
        super().observe(result)
        self.results.append(result)
        contexts = {row.sequence_id: row.context_tokens for row in result.view.rows}
        for row in result.rows:
            if row.trials:
                ranks = self.trials.setdefault(row.sequence_id, {})
                before = contexts[row.sequence_id]
                for depth, rank, _, accepted in row.trials:
                    ranks[before + depth - 1] = rank + 1 if accepted else NEVER


def recorded_requests(records: Sequence[RequestRecord], trials: Trials, seed: int = 0) -> list[SimulatedRequest]:
    """Return the requests of a greedy live run in order of arrival, with the acceptance that was recorded.

    In greedy runs a drafted token depends on the text before it alone, so trials of the same load under several
    controllers may be merged. Places that were never tried (the target's own tokens after whole windows) are drawn
    with the request's own rate.

    Args:
        records: of one run.
        trials: of this run, or merged with those of other runs.
        seed: for places that were never tried.
    """
    accepted = [rank == 1 for ranks in trials.values() for rank in ranks.values()]
    shared_rate = sum(accepted) / len(accepted) if accepted else 0.0
    return [
        SimulatedRequest(
            record.id,
            record.arrived_s,
            record.prompt_tokens,
            record.output_tokens,
            _trace(record, trials.get(f"{record.id}/0", {}), shared_rate, numpy.random.default_rng([seed, place])),
        )
        for place, record in enumerate(sorted(records, key=lambda record: record.arrived_s))
    ]


def recorded_pool(
    records: Sequence[RequestRecord], by_draft: Mapping[str, Trials], seed: int = 0
) -> list[SimulatedRequest]:
    """Return the same of several drafts: each request has the acceptance that was recorded of each draft, by source.

    Args:
        records: of one run.
        by_draft: trials of a greedy run of the same load with each draft alone.
        seed: for places that were never tried.
    """
    alone = {
        draft: recorded_requests(records, trials, seed + number)
        for number, (draft, trials) in enumerate(by_draft.items())
    }
    domains = {record.id: record.domain for record in records}
    return [
        replace(request, traces={draft: own[place].trace for draft, own in alone.items()}, domain=domains[request.id])
        for place, request in enumerate(next(iter(alone.values())))
    ]


def _trace(
    record: RequestRecord, recorded: Mapping[int, int], shared_rate: float, random: numpy.random.Generator
) -> AcceptanceTrace:
    accepted = sum(rank == 1 for rank in recorded.values())
    rate = (accepted + SHARED_TRIALS * shared_rate) / (len(recorded) + SHARED_TRIALS)
    drawn = numpy.where(random.random(record.output_tokens) < rate, 1, NEVER).tolist()
    ranks = [recorded.get(record.prompt_tokens + place, drawn[place]) for place in range(record.output_tokens)]
    return AcceptanceTrace(numpy.array(ranks), numpy.full(record.output_tokens, rate))
