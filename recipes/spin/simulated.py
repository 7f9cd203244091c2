"""Simulated: five drafts on the machine of SPIN's paper, by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from distillspec.progress import progress
from distillspec.serving.simulation import Simulation, load_hardware, load_workload, make_policy, make_workload

SELECTIONS = ("goodput", "lbss", "epsilon_greedy", "prompt_length", "random", "oracle")


@dataclass(frozen=True)
class Simulated:
    """Settings of the simulated part: a machine and a load by name, and rows that are always busy."""

    hardware: str = "a100-7b-five"
    workload: str = "five-domains"
    rows: tuple[int, ...] = (1, 4, 8, 16)
    requests_a_row: int = 40
    policy: str = "goodput"

    def run(self) -> dict[str, Any]:
        """Return tokens a second by rows and selection: each draft for all requests, then the table's."""
        hardware, workload = load_hardware(self.hardware), load_workload(self.workload)
        names, found = [*hardware.latency.members, *SELECTIONS], dict[str, Any]()
        with progress("simulating") as line:
            for place, rows in enumerate(self.rows):
                machine = replace(hardware, slots=rows)
                asked = make_workload(replace(workload, requests=rows * self.requests_a_row), 1e6, 0)
                rates = {}
                for number, name in enumerate(["none", *names]):
                    line.update((place + number / (1 + len(names))) / len(self.rows), f"{rows} rows, {name}")
                    policy = (name, None) if name == "none" else (self.policy, name)
                    made = make_policy(policy[0], hardware.latency, asked, selection=policy[1])
                    last = Simulation(asked, made, machine).run().steps[-1]
                    rates[name] = sum(request.output_tokens for request in asked) / (last.at_s + last.seconds)
                best = max(hardware.latency.members, key=lambda name: rates[name])
                found[str(rows)] = {
                    "tokens_per_s": rates,
                    "best_draft": best,
                    "over_best": {name: rates[name] / rates[best] for name in names},
                }
        return found
