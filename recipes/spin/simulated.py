"""Simulation of five drafts on the machines of SPIN's paper. It compares selections, and SPIN's own parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distillspec.files import write_json
from distillspec.progress import progress
from distillspec.provenance import provenance
from distillspec.recipes.spin.layouts import memory_end, micro_batches
from distillspec.recipes.spin.regret import Regret
from distillspec.recipes.spin.runs import PLAIN, by_domain, rate, simulation
from distillspec.serving.selection.losses import share_lost
from distillspec.serving.selection.selecting import selecting
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
TRIALS, REGRET, PROVENANCE = "trials", "regret", "provenance"  # beside the machines


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

    def run(self, file: Path) -> dict[str, Any]:
        """Return the figures of each machine, what trials cost over a long stream, and regret over time.

        Args:
            file: takes each figure when it is known. What it has is not simulated again.
        """
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        stages: list[tuple[str, str, Callable[[], Any]]] = [
            *((name, str(rows), partial(self._selections, name, rows)) for rows in self.rows for name in self.machines),
            *((name, "parts", partial(self._parts, name)) for name in self.machines),
            *((name, "micro_batches", partial(self._micro_batches, name)) for name in self.machines),
            *((name, "memory", partial(self._memory, name)) for name in self.machines),
            (TRIALS, "", self._trials),
            (REGRET, "", self.regret.run),
        ]
        with progress("simulating") as line:
            for place, (name, what, simulate) in enumerate(stages):
                line.update(place / len(stages), f"{name} {what}")
                own = found.setdefault(name, {})
                if what not in own:
                    own[what] = simulate()
                    found[PROVENANCE] = provenance([], 0)  # of the newest figure
                    write_json(file, found)
        return found

    def _selections(self, name: str, rows: int) -> dict[str, Any]:
        """Return tokens a second without drafts, with each draft for all requests, and by each selection."""
        machine, asked = self._busy(name, rows)
        drafts = list(machine.latency.members)
        results = {
            chosen: simulation(machine, asked, self.policy, chosen).run() for chosen in (PLAIN, *drafts, *SELECTIONS)
        }
        rates = {chosen: rate(result) for chosen, result in results.items()}
        best = max(drafts, key=lambda draft: rates[draft])
        return {
            "tokens_per_s": rates,
            "best_draft": best,
            "over_best": {chosen: own / rates[best] for chosen, own in rates.items()},
            "by_domain": {chosen: by_domain(result) for chosen, result in results.items()},
        }

    def _parts(self, name: str) -> dict[str, float]:
        """Return tokens a second with each of SPIN's parts over those of its base: the best draft, padded, no parts."""
        machine, asked = self._busy(name, self.ablation_rows)
        base = replace(machine, padded_attention=True)
        rates = {draft: self._rate(base, asked, draft) for draft in base.latency.members}
        best = max(rates, key=lambda draft: rates[draft])
        return {
            part: self._rate(replace(base, **changes), asked, "goodput" if chosen else best) / rates[best]
            for part, (chosen, changes) in PARTS.items()
        }

    def _micro_batches(self, name: str) -> dict[str, Any]:
        """Return the curves of the cheapest and of the dearest draft, at each number of rows."""
        by_cost = sorted((members := load_hardware(name).latency.members), key=lambda own: members[own].seconds(0, 1))
        ends = (by_cost[0], by_cost[-1])
        return {str(rows): [micro_batches(*self._busy(name, rows), draft) for draft in ends] for rows in self.rows}

    def _memory(self, name: str) -> dict[str, Any]:
        machine, asked = self._busy(name, self.full_rows)
        drafts = machine.latency.members
        best = max(drafts, key=lambda draft: self._rate(machine, asked, draft))
        return memory_end(hardware_figures(name), asked, self.full_rows, self.policy, best)

    def _trials(self) -> dict[str, float]:
        """Return the shares of the tokens that trials wrote, and of tokens a second that they cost."""
        machine, asked = self._busy(self.machines[0], self.ablation_rows, self.long_requests)
        run = simulation(machine, asked, self.policy, "goodput")
        result = run.run()
        chosen = selecting(run.policy.controller)
        assert chosen is not None, "the policy selects"
        lost = chosen.figures.losses.trials
        assert lost is not None, "goodput estimates it"
        tokens = sum(request.output_tokens for request in result.requests)
        return {
            "requests": self.long_requests,
            "explored": chosen.figures.explored / tokens,
            "lost": share_lost(lost, tokens),
        }

    def _busy(self, name: str, rows: int, requests: int | None = None) -> tuple[Hardware, list[SimulatedRequest]]:
        """Return a machine of so many slots, and requests that keep them busy."""
        load = replace(load_workload(self.workload), requests=requests or rows * self.requests_a_row)
        return replace(load_hardware(name), slots=rows), make_workload(load, 1e6, 0)

    def _rate(self, machine: Hardware, asked: list[SimulatedRequest], selection: str) -> float:
        return rate(simulation(machine, asked, self.policy, selection).run())
