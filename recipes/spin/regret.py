"""Regret of selections against an oracle, over many answers, one at a time. One of the traces drifts.

Regret is the time that a selection has taken beyond the oracle's, in units of the oracle's mean time of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from distillspec.config.simulation import WorkloadConfig
from distillspec.recipes.spin.runs import simulation
from distillspec.serving.simulation import Hardware, SimulatedRequest, load_hardware, load_workload, make_workload
from distillspec.types import Floats

LEARNING = ("lbss", "epsilon_greedy", "goodput")  # selections that learn
ONE, FIVE, DRIFT = "one kind", "five kinds", "drift"
TRACES = (ONE, FIVE, DRIFT)
KINDS = ("sql", "maths", "summaries")  # of the trace that drifts, in turn. `ONE` has the first alone
POINTS = 40  # of a curve
FITTED = 8  # answers: fits leave out what was before
LEAST = 16  # answers of a trace

FEWEST = 3  # seeds
NARROW = 0.005  # share of the oracle's time: no further seed is run where two standard errors are as narrow


@dataclass(frozen=True)
class Regret:
    """Settings of the regret curves.

    Attributes:
        answers: of each trace.
        seeds: of each selection at most, whose regrets are averaged. Fewer are run where they agree.
    """

    answers: int = 450
    seeds: int = 4
    machine: str = "a100-7b-five"
    workload: str = "five-domains"
    policy: str = "goodput"

    def run(self, trace: str) -> dict[str, Any]:
        """Return the curves of a drawn trace: answers, and the regret of each selection after them, with its fits."""
        return self.curves(self._drawn(trace), load_hardware(self.machine))

    def _drawn(self, trace: str) -> list[SimulatedRequest]:
        load = load_workload(self.workload)
        if trace == FIVE:
            return make_workload(replace(load, requests=self.answers), 1e6, 0)
        return _of_kinds(load, KINDS[:1] if trace == ONE else KINDS, self.answers)

    def curves(self, requests: Sequence[SimulatedRequest], hardware: Hardware) -> dict[str, Any]:
        """Return the curves of answers one after another on a machine."""
        machine = replace(hardware, slots=1)
        best = self._ends(machine, requests, "oracle", 0)
        answer_counts = numpy.unique(numpy.geomspace(1, len(requests), POINTS).round().astype(int))
        figures: dict[str, Any] = {"answers": answer_counts.tolist(), "oracle_s": float(best[-1])}
        figures |= {"regret": {}, "fits": {}, "seeds": {}, "two_errors": {}}
        an_answer_s = best[-1] / len(requests)
        for name in LEARNING:
            runs = self._runs(machine, requests, name, NARROW * float(best[-1]))
            regret = (numpy.mean(runs, axis=0) - best)[answer_counts - 1] / an_answer_s
            figures["regret"][name] = regret.tolist()
            fitted = answer_counts >= FITTED
            figures["fits"][name] = fits(answer_counts[fitted].astype(float), regret[fitted])
            figures["seeds"][name] = len(runs)
            figures["two_errors"][name] = _two_errors(runs) / an_answer_s
        return figures

    def _runs(
        self, machine: Hardware, requests: Sequence[SimulatedRequest], selection: str, narrow_s: float
    ) -> list[Floats]:
        """Return the ends of answers `[answers]` with some seeds, until two standard errors of the last are narrow."""
        runs = list[Floats]()
        for seed in range(self.seeds):
            runs.append(self._ends(machine, requests, selection, seed))
            if len(runs) >= FEWEST and _two_errors(runs) <= narrow_s:
                break
        return runs

    def _ends(self, machine: Hardware, requests: Sequence[SimulatedRequest], selection: str, seed: int) -> Floats:
        """Return the seconds `[answers]` at which each answer is finished."""
        result = simulation(machine, requests, self.policy, selection, seed).run()
        return numpy.array([stats.finished_s for stats in result.stats], dtype=float)


def _two_errors(runs: Sequence[Floats]) -> float:
    """Return two standard errors of the mean of the last answer's end, in seconds. 0 for a single run."""
    last = [float(run[-1]) for run in runs]
    return 2 * float(numpy.std(last, ddof=1)) / len(last) ** 0.5 if len(last) > 1 else 0.0


def fits(answer_counts: Floats, regret: Floats) -> dict[str, dict[str, float]]:
    """Return lines through regret over log2 n, and over n: their slopes, and the shares of variance they explain."""
    lines = {}
    for name, x in (("log2", numpy.log2(answer_counts)), ("linear", answer_counts)):
        slope, start = numpy.polyfit(x, regret, 1)
        unexplained = float(((regret - start - slope * x) ** 2).sum())
        total = float(((regret - regret.mean()) ** 2).sum())
        lines[name] = {"slope": float(slope), "r2": 1 - unexplained / total if total else 0.0}
    return lines


def _of_kinds(load: WorkloadConfig, kinds: Sequence[str], answers: int) -> list[SimulatedRequest]:
    """Return requests of each kind in turn, all under one domain name."""
    requests = list[SimulatedRequest]()
    for number, kind in enumerate(kinds):
        count = answers * (number + 1) // len(kinds) - len(requests)
        load_of_kind = replace(load, requests=count, alphas={kind: load.alphas[kind]})
        requests += make_workload(load_of_kind, 1e6, number)
    return [replace(request, id=f"r{index}", arrival_s=0.0, domain="text") for index, request in enumerate(requests)]
