"""Event clock: the engine's own step loop, with its scheduler, slots and controller, on a simulated machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from distillspec.errors import ConfigError
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import Request, RequestStats, SequenceState
from distillspec.serving.bench.step_record import StepRecord
from distillspec.serving.execution.slot_pool import SlotPool
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.simulation.executor import SimulatedExecutor
from distillspec.serving.simulation.hardware import Hardware
from distillspec.serving.simulation.policies import Policy
from distillspec.serving.simulation.simulated_row import SimulatedRow
from distillspec.serving.simulation.workload import SimulatedRequest, check_fits
from distillspec.serving.step.core import EngineCore


@dataclass(frozen=True)
class SimulationResult:
    """Statistics of every request in order of arrival, and every step. Times are seconds on the simulated clock."""

    requests: tuple[SimulatedRequest, ...]
    stats: tuple[RequestStats, ...]
    steps: tuple[StepRecord, ...]


class Simulation:
    """Serves `requests` under `policy` on `hardware`.

    The step loop is the engine's (`EngineCore`). Its executor looks results up: seconds in the hardware's costs,
    acceptance in each request's trace.

    Raises:
        ConfigError: there are no requests, one does not fit a slot, or arrivals are not in order.
    """

    def __init__(self, requests: Sequence[SimulatedRequest], policy: Policy, hardware: Hardware, seed: int = 0) -> None:
        if not requests:
            raise ConfigError("the workload is empty; give at least one request")
        if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(requests)):
            raise ConfigError("requests must come in order of arrival")
        check_fits(requests, min(hardware.max_len, hardware.cache_tokens))
        self.requests, self.policy = tuple(requests), policy
        self.executor = SimulatedExecutor(hardware, seed)
        pool = SlotPool(hardware.slots, hardware.max_len, hardware.cache_tokens)
        self.core = EngineCore(
            self.executor,
            pool,
            policy.controller,
            None,
            prefill_chunk=hardware.prefill_chunk,
            prefix_reuse=False,
            clock=lambda: self.executor.now,
        )
        self.arrived: list[SequenceState] = []  # in order of arrival, finished ones too
        self._steps: list[StepRecord] = []

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.executor.now

    @property
    def sequences(self) -> SequenceManager:
        """All unfinished sequences."""
        return self.core.sequences

    @property
    def has_work(self) -> bool:
        """True while requests are to come, or unfinished."""
        return len(self.arrived) < len(self.requests) or bool(self.sequences.unfinished)

    @property
    def result(self) -> SimulationResult:
        """Requests that have arrived and steps so far. It is whole when there is no work left."""
        return SimulationResult(self.requests, tuple(s.stats for s in self.arrived), tuple(self._steps))

    def run(self) -> SimulationResult:
        """Step until every request is answered."""
        while self.has_work:
            self.step()
        return self.result

    def step(self) -> StepResult | None:
        """Run one step, after a jump to the next arrival if nothing is to be done."""
        if not self.sequences.unfinished and len(self.arrived) < len(self.requests):
            self.executor.now = max(self.now, self.requests[len(self.arrived)].arrival_s)
        self._enqueue_arrived()
        started_s, result = self.now, self.core.step().result
        if result is not None:
            self._steps.append(StepRecord.of(result, started_s))
        return result

    def _enqueue_arrived(self) -> None:
        """Queue the requests that have arrived by now."""
        while (count := len(self.arrived)) < len(self.requests) and self.requests[count].arrival_s <= self.now:
            request = self.requests[count]
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            made = Request(request.id, (0,) * request.prompt_tokens, params, domain=request.domain)
            self.sequences.enqueue(made, request.arrival_s)
            sequence = self.sequences.unfinished[f"{request.id}/0"]
            self.arrived.append(sequence)
            threshold = self.policy.confidence_threshold
            self.executor.rows[sequence.id] = SimulatedRow.of(request.prompt_tokens, request.by_draft, threshold)
