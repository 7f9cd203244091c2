"""Requests as they were served live, for the simulator: the same arrivals, lengths and luck (SmartSpec's Fig. 13)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy

from distillspec.serving.bench.records import RequestRecord
from distillspec.serving.control.base import LengthController, StepResult
from distillspec.serving.control.wrapped import WrappedController
from distillspec.serving.simulation.luck import NEVER, Luck
from distillspec.serving.simulation.workload import SimulatedRequest

SHARED_TRIALS = 10.0  # what the acceptance of all requests is worth beside a request's own

Trials = Mapping[str, Mapping[int, bool]]  # by sequence, then by tokens before the drafted one: whether it stood


class Witness(WrappedController):
    """A controller that plans as the one inside, and keeps every step and which drafted tokens stood."""

    def __init__(self, inside: LengthController) -> None:
        super().__init__(inside)
        self.results: list[StepResult] = []
        self.trials: dict[str, dict[int, bool]] = {}

    def observe(self, result: StepResult) -> None:
        super().observe(result)
        self.results.append(result)
        contexts = {row.sequence_id: row.context_tokens for row in result.view.rows}
        for row in result.rows:
            if row.proposed:
                own, first = self.trials.setdefault(row.sequence_id, {}), contexts[row.sequence_id]
                own.update({first + place: place < row.accepted for place in range(row.tried)})


def seen_requests(records: Seq[RequestRecord], trials: Trials, seed: int = 0) -> list[SimulatedRequest]:
    """The requests of a live run in order of arrival; drafted tokens stand where they were seen to.

    Greedy runs alone have luck of this kind: there a place's drafted token depends on nothing but the text before it,
    so that runs of the same load under several controllers may be put together. Places that were never tried (those
    of the target's own tokens after whole windows) are drawn with the request's own rate.
    """
    every = [stood for own in trials.values() for stood in own.values()]
    shared = sum(every) / len(every) if every else 0.0
    return [
        SimulatedRequest(
            record.id,
            record.arrived_s,
            record.prompt_tokens,
            record.output_tokens,
            _luck(record, trials.get(f"{record.id}/0", {}), shared, numpy.random.default_rng([seed, place])),
        )
        for place, record in enumerate(sorted(records, key=lambda record: record.arrived_s))
    ]


def _luck(record: RequestRecord, own: Mapping[int, bool], shared: float, random: numpy.random.Generator) -> Luck:
    rate = (sum(own.values()) + SHARED_TRIALS * shared) / (len(own) + SHARED_TRIALS)
    drawn = (random.random(record.output_tokens) < rate).tolist()
    stands = [own.get(record.prompt_tokens + place, drawn[place]) for place in range(record.output_tokens)]
    return Luck(numpy.where(stands, 1, NEVER), numpy.full(record.output_tokens, rate))
