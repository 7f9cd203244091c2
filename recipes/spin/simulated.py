"""Simulation of five drafts on the machines of SPIN's paper. It compares selections, and SPIN's own parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distillspec.config.simulation import WorkloadConfig
from distillspec.files import write_json
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
    requests_a_row: int = 16
    ablation_rows: int = 8
    long_requests: int = 10_000  # over which trials are counted
    policy: str = "goodput"

    def run(self, file: Path) -> dict[str, Any]:
        """Return the figures of each machine, and what trials cost over a long stream.

        Args:
            file: takes each figure when it is known. What it has is not simulated again.
        """
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        stages: list[tuple[str, str, Callable[[], Any]]] = [
            *((name, str(rows), partial(self._selections, name, rows)) for rows in self.rows for name in self.machines),
            *((name, "parts", partial(self._parts, name)) for name in self.machines),
            ("trials", "", self._trials),
        ]
        with progress("simulating") as line:
            for place, (name, what, simulate) in enumerate(stages):
                line.update(place / len(stages), f"{name} {what}")
                own = found.setdefault(name, {})
                if what not in own:
                    own[what] = simulate()
                    write_json(file, found)
        return found

    def _selections(self, name: str, rows: int) -> dict[str, Any]:
        """Return tokens a second without drafts, with each draft for all requests, and by each selection."""
        machine = load_hardware(name)
        drafts = list(machine.latency.members)
        rates = {chosen: self._rate(machine, rows, chosen) for chosen in (PLAIN, *drafts, *SELECTIONS)}
        best = max(drafts, key=lambda draft: rates[draft])
        return {"tokens_per_s": rates, "best_draft": best, "over_best": {n: rates[n] / rates[best] for n in rates}}

    def _parts(self, name: str) -> dict[str, float]:
        """Return tokens a second with each of SPIN's parts over those of its base: the best draft, padded, no parts."""
        base, rows = replace(load_hardware(name), padded_attention=True), self.ablation_rows
        rates = {draft: self._rate(base, rows, draft) for draft in base.latency.members}
        best = max(rates, key=lambda draft: rates[draft])
        return {
            part: self._rate(replace(base, **changes), rows, "goodput" if chosen else best) / rates[best]
            for part, (chosen, changes) in PARTS.items()
        }

    def _trials(self) -> dict[str, float]:
        """Return the shares of the tokens that trials wrote and cost."""
        machine = load_hardware(self.machines[0])
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
    machines = [_of_machine(name, own) for name, own in found.items() if name != "trials"]
    trials = found["trials"][""]
    line = (
        f"Trials over {trials['requests']:,} requests: {trials['explored']:.1%} of the tokens were written while the "
        f"draft was on trial, and trials cost {trials['lost']:.1%} of them."
    )
    return "\n\n".join([*machines, line])


def _of_machine(machine: str, own: dict[str, Any]) -> str:
    by_rows = {rows: found for rows, found in own.items() if rows != "parts"}
    names = list(next(iter(by_rows.values()))["tokens_per_s"])
    lines = [f"Simulated, {machine}: tokens/s over those of the best single draft", ""]
    lines += [f"| rows | best draft | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for rows, found in by_rows.items():
        lines.append(f"| {rows} | {found['best_draft']} | {_cells(found['over_best'], names)} |")
    parts = ", ".join(f"{part} {gain:.2f}" for part, gain in own["parts"].items())
    return "\n".join([*lines, "", f"SPIN's parts over its base: {parts}"])


def _cells(found: dict[str, float], names: Sequence[str]) -> str:
    return " | ".join(f"{found[name]:.2f}" for name in names)
