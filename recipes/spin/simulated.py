"""Simulated: five drafts on the machines of SPIN's paper, by the number of rows; its parts alone and together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distillspec.config.simulation import WorkloadConfig
from distillspec.progress import progress
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.simulation import (
    Hardware,
    Simulation,
    load_hardware,
    load_workload,
    make_policy,
    make_workload,
)

SELECTIONS = ("goodput", "lbss", "epsilon_greedy", "prompt_length", "random", "oracle")
PLAIN = "none"
# SPIN's parts, each as the selection and a change of the machine. Its base pads attention and has one draft.
PARTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "selection": (True, {}),
    "decomposition": (False, {"padded_attention": False}),
    "pipelining": (False, {"micro_batches": 0}),
    "all": (True, {"padded_attention": False, "micro_batches": 0}),
}


@dataclass(frozen=True)
class Simulated:
    """Settings of the simulated part: machines and a load by name, and rows that are always busy."""

    rows: tuple[int, ...]
    machines: tuple[str, ...] = ("a100-7b-five", "a100-13b-five", "a100x2-30b-five")
    workload: str = "five-domains"
    requests_a_row: int = 24
    ablation_rows: int = 8
    long_requests: int = 10_000  # over which trials are counted
    policy: str = "goodput"

    def run(self) -> dict[str, Any]:
        """Return the figures of each machine, and what trials cost over a long stream."""
        machines = {name: load_hardware(name) for name in self.machines}
        stages = [(name, rows) for name in machines for rows in self.rows]
        found: dict[str, Any] = {name: {"rows": {}, "parts": {}} for name in machines}
        with progress("simulating") as line:
            for place, (name, rows) in enumerate(stages):
                line.update(place / (1 + len(stages)), f"{name}, {rows} rows")
                found[name]["rows"][str(rows)] = self._selections(machines[name], rows)
                if rows == self.rows[-1]:
                    found[name]["parts"] = self._parts(machines[name])
            line.update(len(stages) / (1 + len(stages)), "trials over a long stream")
            trials = self._trials(machines[self.machines[0]])
        return {"machines": found, "trials": trials}

    def _selections(self, machine: Hardware, rows: int) -> dict[str, Any]:
        """Return tokens a second without drafts, with each draft for all requests, and by each selection."""
        drafts = list(machine.latency.members)
        rates = {name: self._rate(machine, rows, name) for name in (PLAIN, *drafts, *SELECTIONS)}
        best = max(drafts, key=lambda name: rates[name])
        return {"tokens_per_s": rates, "best_draft": best, "over_best": {n: rates[n] / rates[best] for n in rates}}

    def _parts(self, machine: Hardware) -> dict[str, float]:
        """Return tokens a second with each of SPIN's parts over those of its base: the best draft, padded, no parts."""
        base, rows = replace(machine, padded_attention=True), self.ablation_rows
        rates = {name: self._rate(base, rows, name) for name in machine.latency.members}
        best = max(rates, key=lambda name: rates[name])
        return {
            part: self._rate(replace(base, **changes), rows, "goodput" if chosen else best) / rates[best]
            for part, (chosen, changes) in PARTS.items()
        }

    def _trials(self, machine: Hardware) -> dict[str, float]:
        """Return the shares of the tokens that trials wrote and cost."""
        simulation = self._simulation(machine, self.ablation_rows, "goodput", self.long_requests)
        result = simulation.run()
        chosen = selecting(simulation.policy.controller)
        assert chosen is not None, "the policy selects"
        tokens = sum(request.output_tokens for request in result.requests)
        return {
            "requests": self.long_requests,
            "explored": chosen.figures.explored / tokens,
            "lost": chosen.figures.lost / tokens,
        }

    def _rate(self, machine: Hardware, rows: int, selection: str) -> float:
        """Return tokens a second over the whole run."""
        simulation = self._simulation(machine, rows, selection, rows * self.requests_a_row)
        result = simulation.run()
        last = result.steps[-1]
        return sum(request.output_tokens for request in result.requests) / (last.at_s + last.seconds)

    def _simulation(self, machine: Hardware, rows: int, selection: str, requests: int) -> Simulation:
        load: WorkloadConfig = replace(load_workload(self.workload), requests=requests)
        asked = make_workload(load, 1e6, 0)
        name, chosen = (PLAIN, None) if selection == PLAIN else (self.policy, selection)
        made = make_policy(name, machine.latency, asked, selection=chosen)
        return Simulation(asked, made, replace(machine, slots=rows))


def tables(found: dict[str, Any]) -> str:
    """Return the tables of what `Simulated.run` found."""
    parts = [_of_machine(name, own) for name, own in found["machines"].items()]
    trials = found["trials"]
    line = (
        f"Trials over {trials['requests']:,} requests: {trials['explored']:.1%} of the tokens were written while the "
        f"draft was on trial, and trials cost {trials['lost']:.1%} of them."
    )
    return "\n\n".join([*parts, line])


def _of_machine(name: str, own: dict[str, Any]) -> str:
    names = list(next(iter(own["rows"].values()))["tokens_per_s"])
    lines = [f"Simulated, {name}: tokens/s over those of the best single draft", ""]
    lines += [f"| rows | best draft | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for rows, found in own["rows"].items():
        lines.append(f"| {rows} | {found['best_draft']} | {_cells(found['over_best'], names)} |")
    parts = ", ".join(f"{part} {gain:.2f}" for part, gain in own["parts"].items())
    return "\n".join([*lines, "", f"SPIN's parts over its base: {parts}"])


def _cells(found: dict[str, float], names: Sequence[str]) -> str:
    return " | ".join(f"{found[name]:.2f}" for name in names)
