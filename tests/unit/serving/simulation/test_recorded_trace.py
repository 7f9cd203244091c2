"""Recorded requests: the same lengths and arrivals, and the same drafted tokens accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.config import WorkloadConfig
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.bench.records import RequestRecord
from distillspec.serving.selection.by_name import compared_selection
from distillspec.serving.simulation import (
    Policy,
    SimulatedRequest,
    Simulation,
    SimulationResult,
    load_hardware,
    load_workload,
    make_workload,
)
from distillspec.serving.simulation.recorded_trace import AcceptanceRecorder, recorded_pool, recorded_requests

MACHINE, POOL = load_hardware("a100-7b"), load_hardware("a100-7b-five")


def served(
    requests: list[SimulatedRequest], length: int
) -> tuple[AcceptanceRecorder, list[RequestRecord], list[float]]:
    """A simulation in the place of a live run: what a recorder saw, the records, the latencies."""
    recorder = AcceptanceRecorder(FixedLength(length))
    result = Simulation(requests, Policy("seen", recorder), MACHINE).run()
    return recorder, records_of(result), [s.total_s or 0.0 for s in result.stats]


def records_of(result: SimulationResult) -> list[RequestRecord]:
    """Return the records of a live run that would have gone so."""
    return [
        RequestRecord(
            request.id,
            request.domain,
            request.arrival_s,
            stats.first_token_s or 0,
            stats.finished_s or 0,
            request.prompt_tokens,
            request.output_tokens,
        )
        for request, stats in zip(result.requests, result.stats, strict=True)
    ]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_run_served_again_as_it_was_seen_takes_as_long(length: int) -> None:
    requests = make_workload(WorkloadConfig(requests=30, output_tokens=40, output_spread=0.5, alpha=0.6), 10.0)
    recorder, records, latencies = served(requests, length)
    again = recorded_requests(records[::-1], recorder.trials)
    assert [r.id for r in again] == [r.id for r in requests]
    assert served(again, length)[2] == latencies


def test_what_was_seen_stands_and_the_rest_is_drawn_with_the_requests_own_rate() -> None:
    requests = make_workload(WorkloadConfig(requests=40, output_tokens=200, alpha=0.5, request_spread=0.25), 10.0)
    recorder, records, _ = served(requests, 3)
    for before, after in zip(requests, recorded_requests(records, recorder.trials), strict=True):
        own = recorder.trials[f"{before.id}/0"]
        for place, rank in enumerate(after.trace.ranks):
            if place + before.prompt_tokens in own:
                assert (rank == 1) == (before.trace.ranks[place] == 1)
    rates = [numpy.mean(numpy.array(r.trace.ranks) == 1) for r in requests]
    seen = [numpy.mean(numpy.array(r.trace.ranks) == 1) for r in recorded_requests(records, recorder.trials)]
    assert numpy.corrcoef(rates, seen)[0, 1] > 0.9


def test_without_any_trial_nothing_stands() -> None:
    (request,) = recorded_requests([RequestRecord("a", "", 0.0, 1.0, 2.0, 5, 8)], {})
    assert request.trace.runs == [0] * 9


def test_each_draft_has_the_acceptance_that_was_recorded_of_it() -> None:
    load = replace(load_workload("five-domains"), requests=20, output_tokens=40)
    asked = make_workload(load, 10.0)
    seen = {draft: alone(asked, draft) for draft in POOL.latency.members}
    records = next(iter(seen.values()))[1]
    again = recorded_pool(records, {draft: recorder.trials for draft, (recorder, _, _) in seen.items()})
    assert [request.domain for request in again] == [request.domain for request in asked]
    for draft, (_, _, latencies) in seen.items():
        assert alone(again, draft)[2] == latencies, "served again as it was seen"
    for place, request in enumerate(again):
        tried = seen["s1b"][0].trials[f"{request.id}/0"]
        known = [place_ - request.prompt_tokens for place_ in tried]
        before, after = (numpy.array(own[place].traces["s1b"].ranks) == 1 for own in (asked, again))
        assert (before[known] == after[known]).all()


def alone(asked: list[SimulatedRequest], draft: str) -> tuple[AcceptanceRecorder, list[RequestRecord], list[float]]:
    """A simulation in the place of a live run with one draft of a pool."""
    chosen = compared_selection(FixedLength(3), draft, list(POOL.latency.members), {})
    recorder = AcceptanceRecorder(chosen)
    result = Simulation(asked, Policy("seen", recorder), POOL).run()
    return recorder, records_of(result), [s.total_s or 0.0 for s in result.stats]
