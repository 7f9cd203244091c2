"""Requests as they were seen: the same lengths and arrivals, and drafted tokens that stand where they stood."""

from __future__ import annotations

import numpy
import pytest

from distillspec.config import WorkloadConfig
from distillspec.serving.bench.records import RequestRecord
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.simulation import Policy, SimulatedRequest, Simulation, load_hardware, make_workload
from distillspec.serving.simulation.seen import Witness, seen_requests

MACHINE = load_hardware("a100-7b")


def served(requests: list[SimulatedRequest], length: int) -> tuple[Witness, list[RequestRecord], list[float]]:
    """A simulation in the place of a live run: what a witness saw, the records, the latencies."""
    witness = Witness(FixedLength(length))
    result = Simulation(requests, Policy("seen", witness), MACHINE).run()
    records = [
        RequestRecord(r.id, "", r.arrival_s, s.first_token_s or 0, s.finished_s or 0, r.prompt_tokens, r.output_tokens)
        for r, s in zip(result.requests, result.stats, strict=True)
    ]
    return witness, records, [s.total_s or 0.0 for s in result.stats]


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_run_served_again_as_it_was_seen_takes_as_long(length: int) -> None:
    requests = make_workload(WorkloadConfig(requests=30, output_tokens=40, output_spread=0.5, alpha=0.6), 10.0)
    witness, records, latencies = served(requests, length)
    again = seen_requests(records[::-1], witness.trials)
    assert [r.id for r in again] == [r.id for r in requests]
    assert served(again, length)[2] == latencies


def test_what_was_seen_stands_and_the_rest_is_drawn_with_the_requests_own_rate() -> None:
    requests = make_workload(WorkloadConfig(requests=40, output_tokens=200, alpha=0.5, request_spread=0.25), 10.0)
    witness, records, _ = served(requests, 3)
    for before, after in zip(requests, seen_requests(records, witness.trials), strict=True):
        own = witness.trials[f"{before.id}/0"]
        for place, rank in enumerate(after.luck.ranks):
            if place + before.prompt_tokens in own:
                assert (rank == 1) == (before.luck.ranks[place] == 1)
    rates = [numpy.mean(numpy.array(r.luck.ranks) == 1) for r in requests]
    seen = [numpy.mean(numpy.array(r.luck.ranks) == 1) for r in seen_requests(records, witness.trials)]
    assert numpy.corrcoef(rates, seen)[0, 1] > 0.9


def test_without_any_trial_nothing_stands() -> None:
    (request,) = seen_requests([RequestRecord("a", "", 0.0, 1.0, 2.0, 5, 8)], {})
    assert request.luck.runs == [0] * 9
