"""Fidelity of the simulator: the same load live, and simulated from the machine's own profile.

    python benchmarks/fidelity.py --draft FOLDER --prompts math.jsonl code.jsonl …

Sends Poisson loads below saturation to the engine under several policies, and serves the same arrivals, lengths and
acceptance in a simulation whose costs are those of a profile (SmartSpec's Fig. 13). Each load has a profile of its own,
measured just before it: where others share the memory, the same pass takes a third longer in some minutes than in
others. Times of the steps' parts are compared as well. Writes `results/fidelity.json`, `fidelity.png`, and the last
profile as `fidelity_profile.json` and `.png` (Fig. 7). `step_time_error` has medians by load and over all loads: of the
controllers' predictions for live steps, and of simulated steps' times against live ones, by policy and kind of step.

On a machine that others use too, `--own-time` counts the processor time of the one computing thread in place of wall
time, in profile and run alike: waiting for the processor is left out, though not what sharing caches costs. Policies
take turns for `--rounds`. Each request counts with its median over the rounds, live and simulated, so one pause of the
machine does not count as the engine's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Others, write_result
from fidelity_cells import Cell, LiveRun, SimulatedRun, draw, figures_of, step_time_errors
from live import add_options, capacity_of, load, make_engine, prompts_of, setting_of

from distillspec.config import HardwareConfig, TargetConfig
from distillspec.models import load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import Arrival
from distillspec.serving.bench.summary import summarise
from distillspec.serving.commands.profile import plot
from distillspec.serving.costs.hardware_profile import Profile
from distillspec.serving.profiler import Grid, measure
from distillspec.serving.simulation import Hardware, Policy, Simulation, derive_hardware
from distillspec.serving.simulation.acceptance_trace import NEVER
from distillspec.serving.simulation.recorded_trace import AcceptanceRecorder, recorded_requests
from distillspec.types import Prompt

GOALS = {"mean_latency": 0.10, "held_out_error": 0.08, "step_time_error": 0.08}


class OwnTime:
    """A clock of this thread's processor time, and of the time that was slept."""

    def __init__(self) -> None:
        self._slept = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._slept

    def sleep(self, seconds: float) -> None:
        """Let time pass without waiting for it."""
        self._slept += seconds


def main() -> None:
    options = _options()
    own_time = OwnTime()
    if options.own_time:
        torch.set_num_threads(1)
    target = load_target(TargetConfig(path=options.target, dtype="auto"))
    draft = load_pretrained(options.draft, target, target.dtype)
    prompts = prompts_of(options, target)
    engine = make_engine(options, target, draft, options.speculation_length)
    if options.own_time:
        engine.clock = own_time
    sleep = own_time.sleep if options.own_time else time.sleep
    runs = list[LiveRun]()
    machines = dict[float, Hardware]()
    try:
        capacity = capacity_of(engine, options, prompts)
        for rate in [share * capacity for share in options.loads]:
            profile = profiled(engine, options)
            profile.save(options.output / "fidelity_profile.json")
            machines[rate] = simulated_machine(engine, options.output / "fidelity_profile.json")
            runs += live(engine, options, prompts, rate, sleep)
    finally:
        engine.close()
    by_cell: dict[tuple[float, str], list[LiveRun]] = {}
    for run in runs:
        by_cell.setdefault((run.rate, run.policy), []).append(run)
    cells = [
        Cell(cell_runs, [simulate(run, runs, machines[run.rate], options) for run in cell_runs])
        for cell_runs in by_cell.values()
    ]
    plot(profile, options.output / "fidelity_profile.png")
    draw(cells, options.output / "fidelity.png")
    profile_errors = _judge_profile(profile)
    time_errors = step_time_errors(cells)
    result = {
        **setting_of(options, target, prompts),
        "clock": "own processor time" if options.own_time else "wall",
        "capacity_requests_per_s": capacity,
        "profile": profile_errors,
        "rounds": options.rounds,
        "runs": [figures_of(cell) for cell in cells],
        "worst": max(abs(cell.ratio - 1) for cell in cells),
        "step_time_error": time_errors,
        "goals": GOALS,
        "met": {
            "mean_latency": all(abs(cell.ratio - 1) <= GOALS["mean_latency"] for cell in cells),
            "held_out_error": profile_errors["met"],
            **{
                f"step_time_error, {side}": max(own_time.values()) <= GOALS["step_time_error"]
                for side, own_time in time_errors.items()
            },
        },
    }
    write_result("fidelity", result, options.seed, options.output)


def profiled(engine: Engine, options: argparse.Namespace) -> Profile:
    """Measure the costs of passes on this machine."""
    longest = options.longest_prompt
    rows = [r for r in (1, 2, 3, 5, 8, 16) if r <= options.slots]
    lengths = [k for k in (0, 1, 2, 4) if k <= options.speculation_length]
    prompts = [max(1, longest // share) for share in (16, 8, 4, 2, 1)]
    grid = Grid([max(1, longest // 8), longest // 2, longest], rows, lengths, prompts, options.profile_rounds)
    return measure(engine, grid, seed=options.seed, clock=engine.clock)


def simulated_machine(engine: Engine, profile: Path) -> Hardware:
    """The profile's costs, the engine's own limits."""
    limits = engine.limits
    machine = HardwareConfig(
        profile=str(profile),
        slots=limits.slots,
        max_len=limits.max_len,
        cache_tokens=limits.cache_tokens,
        prefill_chunk=limits.prefill_chunk,
    )
    return derive_hardware(machine)


def live(
    engine: Engine, options: argparse.Namespace, prompts: list[Prompt], rate: float, sleep: Callable[[float], None]
) -> list[LiveRun]:
    """All policies at one rate, in turn."""
    arrivals = load(options, prompts, rate)
    latency = Profile.read(options.output / "fidelity_profile.json").latency
    return [
        live_once(
            engine,
            arrivals,
            AcceptanceRecorder(named_controller(name, options.speculation_length, latency)),
            name,
            rate,
            sleep,
        )
        for _ in range(options.rounds)
        for name in options.policies
    ]


def live_once(
    engine: Engine,
    arrivals: Sequence[Arrival],
    recorder: AcceptanceRecorder,
    name: str,
    rate: float,
    sleep: Callable[[float], None],
) -> LiveRun:
    engine.use_controller(recorder)
    others = Others()
    record = drive(engine, arrivals, sleep=sleep)
    assert not record.failed, f"{record.failed} requests failed"
    requests = tuple(sorted(record.requests, key=lambda request: request.arrived_s))
    run = LiveRun(name, rate, requests, recorder.trials, recorder.results, others.cores())
    print(f"{rate:.2f} requests/s, {name}: {summarise(record).latency_s.mean:.2f} s, others {run.others}", flush=True)
    return run


def simulate(
    live_run: LiveRun, runs: Sequence[LiveRun], machine: Hardware, options: argparse.Namespace
) -> SimulatedRun:
    """Serve the same load in the simulator.

    The trials of all policies at this rate are merged, since greedy texts are the same. Where two tokens tie to a
    float's last digits and texts differ, the policy's own trial goes first.
    """
    trials: dict[str, dict[int, int]] = {}
    for run in [*(run for run in runs if run.rate == live_run.rate), live_run]:
        for sequence_id, outcomes in run.trials.items():
            merged = trials.setdefault(sequence_id, {})
            merged.update({position: min(rank, merged.get(position, NEVER)) for position, rank in outcomes.items()})
    recorder = AcceptanceRecorder(named_controller(live_run.policy, options.speculation_length, machine.latency))
    requests = recorded_requests(live_run.requests, trials, options.seed)
    result = Simulation(requests, Policy(live_run.policy, recorder), machine, options.seed).run()
    return SimulatedRun([float(stats.total_s or 0.0) for stats in result.stats], recorder.results)


def _judge_profile(profile: Profile) -> dict[str, Any]:
    parts = {"target": profile.target_cost, **{source: draft.cost for source, draft in profile.drafts.items()}}
    errors = {name: part.held_out_error for name, part in parts.items()}
    return {
        "held_out_error": errors,
        "points": {name: len(part.points) for name, part in parts.items()},
        "met": max(errors.values()) <= GOALS["held_out_error"],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=30.0)
    parser.add_argument("--policies", nargs="+", default=["none", "fixed-2", "goodput"])
    parser.add_argument("--speculation-length", type=int, default=4, help="tokens that a row drafts at most")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6], help="shares of saturation")
    parser.add_argument("--own-time", action="store_true", help="count this thread's processor time")
    parser.add_argument("--rounds", type=int, default=3, help="in which policies take turns")
    parser.add_argument("--profile-rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
