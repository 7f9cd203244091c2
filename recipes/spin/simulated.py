"""Simulation of five drafts on the machines of SPIN's paper. It compares selections, and SPIN's own parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distillspec.files import write_json
from distillspec.recipes.spin.kept import kept
from distillspec.recipes.spin.layouts import memory_end, micro_batches
from distillspec.recipes.spin.regret import TRACES, Regret
from distillspec.recipes.spin.runs import PLAIN, by_domain, draft_rates, rate, simulation
from distillspec.recipes.spin.stages import Stage, fill
from distillspec.recipes.spin.switches import Switches
from distillspec.recipes.spin.trials import cost_of_trials
from distillspec.serving.simulation import (
    Hardware,
    SimulatedRequest,
    hardware_figures,
    load_hardware,
    load_workload,
    make_workload,
)

SELECTIONS = ("goodput", "lbss", "epsilon_greedy", "prompt_length", "random", "oracle")
# SPIN's parts, each as the selection and a change of the machine. Its base pads attention and has one draft.
PARTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "selection": (True, {}),
    "decomposition": (False, {"padded_attention": False}),
    "pipelining": (False, {"micro_batches": 0}),
    "all": (True, {"padded_attention": False, "micro_batches": 0}),
}
MACHINES, TRIALS, REGRET, SWITCHES = "machines", "trials", "regret", "switches"  # in the JSON
COMPARED = "selections"  # of a machine, by rows


@dataclass(frozen=True)
class Simulated:
    """Settings of the simulated part: machines and a load by name, and rows that are always busy."""

    rows: tuple[int, ...]
    machines: tuple[str, ...] = ("a100-7b-five", "a100-13b-five", "a100x2-30b-five")
    workload: str = "five-domains"
    requests_a_row: int = 16
    ablation_rows: int = 8
    full_rows: int = 32  # for which there is no memory
    long_requests: int = 10_000  # over which trials are counted
    policy: str = "goodput"
    regret: Regret = field(default_factory=Regret)
    switches: Switches = field(default_factory=Switches)

    def run(self, file: Path, jobs: int = 1) -> dict[str, Any]:
        """Return the figures of each machine, of switches, what trials cost over a long stream, and regret over time.

        Args:
            file: takes each figure when it is known. A later run of the same code and settings goes on from there.
            jobs: processes side by side.
        """
        figures = kept(file, asdict(self))
        for stages in (self._comparisons, self._others):
            fill(figures, stages(figures), jobs, lambda: write_json(file, figures))
        return figures

    def _comparisons(self, figures: Mapping[str, Any]) -> list[Stage]:
        """Return the stages that tell the best drafts. Those with many rows take longest, and begin."""
        return [
            Stage((MACHINES, name, COMPARED, str(rows)), partial(self._selections, name, rows))
            for rows in sorted(self.rows, reverse=True)
            for name in self.machines
        ]

    def _others(self, figures: Mapping[str, Any]) -> list[Stage]:
        best = partial(self._best, figures)
        return [
            Stage((TRIALS,), partial(self._trials, best(self.machines[0], self.ablation_rows))),
            *(Stage((REGRET, trace), partial(self.regret.run, trace)) for trace in TRACES),
            *(
                Stage((MACHINES, name, key), partial(simulate, name))
                for key, simulate in (("micro_batches", self._micro_batches), ("parts", self._parts))
                for name in self.machines
            ),
            *(
                Stage((MACHINES, name, "memory"), partial(self._memory, name, best(name, self.full_rows)))
                for name in self.machines
            ),
            Stage((SWITCHES,), self.switches.run),
        ]

    def _best(self, figures: Mapping[str, Any], name: str, rows: int) -> str | None:
        """Return the best single draft, None if it was not compared at so many rows."""
        comparison = figures[MACHINES][name][COMPARED].get(str(rows))
        return None if comparison is None else comparison["best_draft"]

    def _selections(self, name: str, rows: int) -> dict[str, Any]:
        """Return tokens a second without drafts, with each draft for all requests, and by each selection."""
        machine, requests = self._busy(name, rows)
        drafts = list(machine.latency.members)
        results = {
            chosen: simulation(machine, requests, self.policy, chosen).run() for chosen in (PLAIN, *drafts, *SELECTIONS)
        }
        rates = {chosen: rate(result) for chosen, result in results.items()}
        best = max(drafts, key=lambda draft: rates[draft])
        return {
            "tokens_per_s": rates,
            "best_draft": best,
            "over_best": {chosen: tokens_per_s / rates[best] for chosen, tokens_per_s in rates.items()},
            "by_domain": {chosen: by_domain(result) for chosen, result in results.items()},
        }

    def _parts(self, name: str) -> dict[str, float]:
        """Return tokens a second with each of SPIN's parts over those of its base: the best draft, padded, no parts."""
        machine, requests = self._busy(name, self.ablation_rows)
        base = replace(machine, padded_attention=True)
        rates = draft_rates(base, requests, self.policy)
        best = max(rates, key=lambda draft: rates[draft])
        return {
            part: self._rate(replace(base, **changes), requests, "goodput" if chosen else best) / rates[best]
            for part, (chosen, changes) in PARTS.items()
        }

    def _micro_batches(self, name: str) -> dict[str, Any]:
        """Return the curves of the cheapest and of the dearest draft, at each number of rows."""
        members = load_hardware(name).latency.members
        by_cost = sorted(members, key=lambda draft: members[draft].seconds(0, 1))
        ends = (by_cost[0], by_cost[-1])
        return {str(rows): [micro_batches(*self._busy(name, rows), draft) for draft in ends] for rows in self.rows}

    def _memory(self, name: str, best: str | None) -> dict[str, Any]:
        machine, requests = self._busy(name, self.full_rows)
        best = best or self._best_of(machine, requests)
        return memory_end(hardware_figures(name), requests, self.full_rows, self.policy, best)

    def _trials(self, best: str | None) -> dict[str, Any]:
        machine, requests = self._busy(self.machines[0], self.ablation_rows, self.long_requests)
        return cost_of_trials(machine, requests, self.policy, best or self._best_of(machine, requests))

    def _best_of(self, machine: Hardware, requests: Sequence[SimulatedRequest]) -> str:
        rates = draft_rates(machine, requests[: machine.slots * self.requests_a_row], self.policy)
        return max(rates, key=lambda draft: rates[draft])

    def _busy(self, name: str, rows: int, requests: int | None = None) -> tuple[Hardware, list[SimulatedRequest]]:
        """Return a machine of so many slots, and requests that keep them busy."""
        load = replace(load_workload(self.workload), requests=requests or rows * self.requests_a_row)
        return replace(load_hardware(name), slots=rows), make_workload(load, 1e6, 0)

    def _rate(self, machine: Hardware, requests: list[SimulatedRequest], selection: str) -> float:
        return rate(simulation(machine, requests, self.policy, selection).run())
