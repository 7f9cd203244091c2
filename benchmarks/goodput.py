"""Lengths by goodput against fixed ones and none, live, under Poisson loads from idle to beyond saturation.

    python benchmarks/goodput.py --draft FOLDER --prompts math.jsonl code.jsonl … [--profile profile.json]

sweep     every policy at every load on the same arrivals, in turns. Gives ratios of mean request latency with
          intervals over requests, and prediction errors of step times and tokens
useless   the same at one load with a draft of random weights, against no speculation
weak      a draft with noise in its weights, of acceptance `--alpha`: fresh engines at batch 1 take turns, by goodput
          with the draft alone and with default proposers, against no speculation
trees     shapes of trees by goodput against chains by goodput and none, at every load

Loads are shares of what the engine writes without speculation when all slots are busy, measured first.
Each section writes `results/goodput_SECTION.json`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import write_result
from live import add_options, capacity_of, load, make_engine, prompts_of, setting_of
from weak_draft import weak

from distillspec.config import DraftConfig, TargetConfig
from distillspec.config.engine import EngineConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.bench.compare import Ratio, speed_ratio
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import Arrival
from distillspec.serving.bench.plot import plot_load
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.rounds import Records, Side, take_turns
from distillspec.serving.bench.summary import LoadSummary, summarise
from distillspec.serving.costs.hardware_profile import Profile
from distillspec.serving.costs.latency import LatencyModel
from distillspec.types import Prompt

GOALS = {"share_of_best": 0.97, "against_best_fixed": 1.05, "step_time_error": 0.08, "useless": 0.98, "trees_low": 0.98}


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype="auto"))
    prompts = prompts_of(options, target)
    sections = {"sweep": sweep, "useless": useless, "weak": weak, "trees": trees}
    for name in options.sections.split(","):
        result = {**setting_of(options, target, prompts), **sections[name](options, target, prompts)}
        write_result(f"goodput_{name}", result, options.seed, options.output)


def sweep(options: argparse.Namespace, target: LanguageModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Every policy at every load."""
    draft = load_pretrained(options.draft, target, target.dtype)
    latency = Profile.load(options.profile, target, {DRAFT: draft}, EngineConfig()).latency if options.profile else None
    names = ["none", *(f"fixed-{k}" for k in options.fixed), "goodput"]
    engine = make_engine(options, target, draft, max(options.fixed), compiled=options.compile)
    capacity, runs = _at_every_load(engine, options, prompts, names, latency)
    summaries = {name: {share: _pooled(runs[share][name]) for share in runs} for name in names}
    plot_load(
        {
            name: {round(share * capacity, 2): summary for share, summary in by_share.items()}
            for name, by_share in summaries.items()
        },
        {name: runs[max(runs)][name][-1] for name in names},
        options.output / "goodput_sweep.png",
    )
    return {
        "capacity_requests_per_s": capacity,
        "profile": options.profile is not None,
        "loads": {str(share): _judge_load(records, share, summaries) for share, records in runs.items()},
        **_judge_sweep(runs, names),
        "goals": GOALS,
    }


def useless(options: argparse.Namespace, target: LanguageModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Return the cost of a draft of random weights."""
    draft = initialise_draft(DraftConfig(kind="pruned", layers=4), target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
    engine = make_engine(options, target, draft, max(options.fixed), compiled=options.compile)
    rate = 0.9 * capacity_of(engine, options, prompts)
    records = in_turn(engine, options, prompts, rate, ["none", "goodput"], None, rounds=3)
    engine.close()
    ratio = speed_ratio(records, "goodput", "none").value
    return {
        "ratio": asdict(ratio),
        "rounds": _by_round(records, "goodput", "none"),
        "sides": {name: _pooled(side_records).to_json() for name, side_records in records.items()},
        "goal": GOALS["useless"],
        "met": ratio.mean >= GOALS["useless"],
        "met_surely": ratio.low >= GOALS["useless"],
    }


def trees(options: argparse.Namespace, target: LanguageModel, prompts: list[Prompt]) -> dict[str, Any]:
    """Trees and chains of one draft, each by goodput."""
    draft = load_pretrained(options.draft, target, target.dtype)
    engine = make_engine(options, target, draft, max(options.fixed), compiled=options.compile, tree="sampled")
    capacity, runs = _at_every_load(engine, options, prompts, ["none", "goodput-chains", "goodput"], None)
    loads = {}
    for share, records in runs.items():
        ratio, over_none = (speed_ratio(records, "goodput", name).value for name in ("goodput-chains", "none"))
        loads[str(share)] = {
            "trees_over_chains": asdict(ratio),
            "trees_over_none": asdict(over_none),
            "rounds": _by_round(records, "goodput", "goodput-chains"),
            "met_surely": ratio.low >= GOALS["trees_low"],
            "sides": {name: _pooled(side_records).to_json() for name, side_records in records.items()},
        }
    return {"capacity_requests_per_s": capacity, "loads": loads, "goal": GOALS["trees_low"]}


def _at_every_load(
    engine: Engine,
    options: argparse.Namespace,
    prompts: list[Prompt],
    names: list[str],
    latency: LatencyModel | None,
) -> tuple[float, Records]:
    """Return the engine's capacity in requests a second, and the runs of all policies by load. Closes the engine."""
    capacity = capacity_of(engine, options, prompts)
    runs: Records = {}
    for share in options.loads:
        runs[share] = in_turn(engine, options, prompts, share * capacity, names, latency, options.rounds)
        print(f"load {share}: {_mean_latencies(runs[share])}", flush=True)
    engine.close()
    return capacity, runs


def in_turn(
    engine: Engine,
    options: argparse.Namespace,
    prompts: list[Prompt],
    rate: float,
    names: list[str],
    latency: LatencyModel | None,
    rounds: int,
) -> dict[str, list[LoadRecord]]:
    """Return one record per policy and round. A policy keeps what it learnt for the next round."""

    def side(name: str) -> Side[Any]:
        speculation_length = max(options.fixed)
        controller = named_controller(name, speculation_length, latency or engine.costs)

        def answer_load(arrivals: Sequence[Arrival[Any]], _: str) -> LoadRecord:
            engine.use_controller(controller)
            return drive(engine, arrivals)

        return answer_load

    sides = {name: side(name) for name in names}
    return take_turns(sides, [rate], rounds, lambda at, round_: load(options, prompts, at, round_))[rate]


def _judge_load(
    records: dict[str, list[LoadRecord]], share: float, summaries: dict[str, dict[float, LoadSummary]]
) -> dict[str, Any]:
    others = [name for name in records if name != "goodput"]
    ratios: dict[str, Ratio] = {name: speed_ratio(records, "goodput", name) for name in others}
    best = min(ratios, key=lambda name: ratios[name].value.mean)
    return {
        "goodput_against": {name: asdict(ratio.value) for name, ratio in ratios.items()},
        "best_other": best,
        "rounds_against_best": _by_round(records, "goodput", best),
        "met": ratios[best].value.mean >= GOALS["share_of_best"],
        "met_surely": ratios[best].value.low >= GOALS["share_of_best"],
        "sides": {name: summaries[name][share].to_json() for name in records},
    }


def _judge_sweep(runs: Records, names: list[str]) -> dict[str, Any]:
    """Return the geometric mean over all loads of the ratios to each single choice. The goal is the best one."""
    others = [name for name in names if name != "goodput"]
    over_all = {
        name: math.exp(
            sum(math.log(speed_ratio(records, "goodput", name).value.mean) for records in runs.values()) / len(runs)
        )
        for name in others
    }
    errors = {share: _pooled(records["goodput"]).step_time_error for share, records in runs.items()}
    goal = GOALS["step_time_error"]
    worst = min(over_all.values())
    return {
        "over_all_loads": over_all,
        "against_best_fixed": worst,
        "against_best_fixed_met": worst >= GOALS["against_best_fixed"],
        "step_time_error": errors,
        "step_time_error_met": all(error is not None and error <= goal for error in errors.values()),
    }


def _by_round(records: dict[str, list[LoadRecord]], of: str, against: str) -> list[float]:
    pairs = zip(records[of], records[against], strict=True)
    return [round(speed_ratio({of: [record], against: [other]}, of, against).value.mean, 3) for record, other in pairs]


def _pooled(records: list[LoadRecord]) -> LoadSummary:
    """All rounds as one run."""
    return summarise(LoadRecord.joined(records))


def _mean_latencies(records: dict[str, list[LoadRecord]]) -> str:
    return ", ".join(f"{name} {_pooled(side_records).latency_s.mean:.2f} s" for name, side_records in records.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=40.0)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.1, 0.5, 0.9, 1.3])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--alpha", type=float, default=0.3, help="acceptance of the weak draft")
    parser.add_argument("--engines", type=int, default=8, help="fresh ones of section weak")
    parser.add_argument("--sections", default="sweep,useless")
    options = parser.parse_args()
    if options.engines < 2:
        parser.error(f"--engines {options.engines}: an interval takes at least 2")
    return options


if __name__ == "__main__":
    main()
