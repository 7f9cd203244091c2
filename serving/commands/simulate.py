"""`distill simulate`: policies by arrival rate on a simulated machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import SimulateCommand
from distillspec.errors import ConfigError
from distillspec.progress import progress
from distillspec.serving.simulation import (
    Hardware,
    SimulatedRequest,
    Simulation,
    derive_hardware,
    make_policy,
    make_workload,
)
from distillspec.serving.simulation.figures import RunFigures, figures_of, plot_latency, table_of, write_figures


def run(config: SimulateCommand, folder: Path) -> None:
    """Write `results.csv`, `latency.png` and `summary.json`, and print the table."""
    hardware = derive_hardware(config.hardware)
    _check_drafts(config, hardware)
    rates = [None] if config.workload.trace is not None else list(config.workload.rates)
    workloads = [make_workload(config.workload, rate, config.seed) for rate in rates]
    selections: list[str | None] = [*config.selections] or [None]
    sides = [(name, chosen) for name in config.policies for chosen in selections]
    side_rates = [(side, index) for index in range(len(rates)) for side in sides]
    simulations = [_simulation(config, hardware, side, workloads[index]) for side, index in side_rates]
    pairs = [(simulation.policy.name, index) for simulation, (_, index) in zip(simulations, side_rates, strict=True)]
    open_run(folder, config)
    runs: list[RunFigures] = []
    with progress("simulating") as line:
        for done, ((name, index), simulation) in enumerate(zip(pairs, simulations, strict=True)):
            line.update(done / len(pairs), f"{name} at {rates[index] or 'the trace'}")
            runs.append(figures_of(name, rates[index], simulation.run()))
    Console().print(table_of(runs, hardware.title))
    write_figures(runs, folder / "results.csv")
    plot_latency(runs, folder / "latency.png", hardware.title)
    close_run(
        folder,
        "simulate",
        {
            "hardware": {**dataclasses.asdict(hardware), "latency": hardware.latency.as_json()},
            "runs": [dataclasses.asdict(figures) for figures in runs],
        },
    )


def _check_drafts(config: SimulateCommand, hardware: Hardware) -> None:
    """Raise ConfigError where machine, load and selections do not name the same drafts."""
    drafts, alphas = set(hardware.latency.members), config.workload.alphas
    if not drafts and (config.selections or alphas):
        raise ConfigError(
            f"selections={config.selections} and workload.alphas are for several drafts; name them in hardware.drafts, "
            "as hardware=a100-7b-five does, or profile several"
        )
    if drafts and (not alphas or any(set(by_draft) != drafts for by_draft in alphas.values())):
        raise ConfigError(
            f"workload.alphas must name the drafts {', '.join(sorted(drafts))} for each domain, as in "
            "workload=five-domains or 'workload.alphas={maths:{A:0.7,B:0.4}}', quoted"
        )


def _simulation(
    config: SimulateCommand, hardware: Hardware, side: tuple[str, str | None], requests: list[SimulatedRequest]
) -> Simulation:
    """Build a simulation. All are built before the first runs, so that a wrong policy name fails at once."""
    name, chosen = side
    policy = make_policy(
        name,
        hardware.latency,
        requests,
        speculation_length=config.speculation_length,
        seed=config.seed,
        settings=config.tree_settings,
        selection=chosen,
    )
    return Simulation(requests, policy, hardware, config.seed)
