"""`distill bench`: the same Poisson load on an engine under several policies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import BenchCommand, BenchConfig, DataConfig
from distillspec.data.chat import render_prompt
from distillspec.data.prompts import read_rows
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.progress import progress
from distillspec.serving.bench.compare import speed_ratio
from distillspec.serving.bench.drive import drive
from distillspec.serving.bench.load import Arrival, poisson_load
from distillspec.serving.bench.plot import plot_load
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.summary import LoadSummary, summarise
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.named import named_controller
from distillspec.serving.control.profile import Profile
from distillspec.serving.engine import Engine
from distillspec.serving.params import SamplingParams
from distillspec.types import Prompt

Summaries = dict[str, dict[float, LoadSummary]]  # by policy, then rate
Ratios = dict[float, dict[str, dict[str, float]]]  # by rate, then policy: how many times faster than the first
Records = dict[float, dict[str, list[LoadRecord]]]  # by rate, then policy: one a round


def run(config: BenchCommand, folder: Path) -> None:
    """Writes `requests.json` (every request), `load.png` and `summary.json`."""
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    draft = load_pretrained(config.draft.path, target, target.dtype) if config.draft.path else None
    prompts = read_prompts(config.bench, target)
    engine = Engine(target, draft, config.engine)
    try:
        policies = _policies(config, engine)
        open_run(folder, config)
        records = _measure(config, engine, prompts, policies)
    finally:
        engine.close()
    summaries: Summaries = {
        name: {rate: summarise(LoadRecord.joined(found[name])) for rate, found in records.items()} for name in policies
    }
    first = config.bench.policies[0]
    ratios: Ratios = {
        rate: {name: asdict(speed_ratio(found, name, first, config.seed).value) for name in policies if name != first}
        for rate, found in records.items()
    }
    Console().print(_table(summaries, ratios, first))
    highest = max(records)
    plot_load(summaries, {name: records[highest][name][-1] for name in policies}, folder / "load.png")
    write_json(folder / "requests.json", _requests(records))
    figures = {name: {str(rate): s.to_json() for rate, s in by_rate.items()} for name, by_rate in summaries.items()}
    close_run(folder, "bench", {"policies": figures, f"times_faster_than_{first}": ratios})


def read_prompts(config: BenchConfig, target: LanguageModel) -> list[Prompt]:
    """The files' prompts in the target's chat template, files taking turns.

    Raises:
        ConfigError: a file that cannot be read, or without a prompt that is short enough.
    """
    by_file = []
    for file in config.prompts:
        rows = read_rows(DataConfig(prompts=file))
        made = [
            Prompt(str(row.get("id", place)), render_prompt(target.tokenizer, row["prompt"]), _domain(row, file))
            for place, row in enumerate(rows)
        ]
        fitting = [prompt for prompt in made if 0 < len(prompt.token_ids) <= config.longest_prompt]
        if not fitting:
            raise ConfigError(f"bench.prompts: {file} has no prompt of at most {config.longest_prompt} tokens")
        by_file.append(fitting)
    return [prompt for group in zip(*by_file, strict=False) for prompt in group]


def _domain(row: dict[str, object], file: str) -> str:
    return str(row.get("domain") or Path(file).stem)


def _policies(config: BenchCommand, engine: Engine) -> dict[str, LengthController]:
    settings, with_model = config.engine, engine.draft is not None
    latency = None
    if settings.profile is not None:
        latency = Profile.load(Path(settings.profile), engine.target, engine.draft).latency
    longest = settings.speculation_length
    policies = {
        name: named_controller(name, longest, latency, drafts_with_model=with_model) for name in config.bench.policies
    }
    for name, controller in policies.items():
        if controller.longest > longest:
            raise ConfigError(f"policy {name} drafts more than engine.speculation_length={longest}; raise that")
    return policies


def _measure(
    config: BenchCommand, engine: Engine, prompts: Seq[Prompt], policies: dict[str, LengthController]
) -> Records:
    bench, policy = config.bench, config.sampling.policy
    params = SamplingParams(
        temperature=policy.temperature,
        top_k=policy.top_k,
        top_p=policy.top_p,
        min_p=policy.min_p,
        max_tokens=bench.max_tokens,
        ignore_eos=bench.ignore_eos,
    )
    names = list(policies)
    records: Records = {rate: {name: [] for name in names} for rate in bench.rates}
    for rate in bench.rates:
        for round_ in range(bench.rounds):
            load = poisson_load(prompts, params, rate, bench.seconds, config.seed + round_)
            start = round_ % len(names)
            for name in names[start:] + names[:start]:
                records[rate][name].append(_one_run(engine, policies[name], load, f"{rate:g} requests/s, {name}"))
    return records


def _one_run(engine: Engine, controller: LengthController, load: Seq[Arrival], title: str) -> LoadRecord:
    engine.use_controller(controller)
    engine.forget_prompts()  # of the side before
    total = len(load)
    with progress(title) as line:
        return drive(
            engine, load, on_progress=lambda done: line.update(done / total, f"{done} of {total} requests answered")
        )


def _table(summaries: Summaries, ratios: Ratios, first: str) -> Table:
    table = Table(title="mean latency, with 50 and 99 % quantiles of time to first token and per token")
    for column in ("requests/s", "policy", "tokens/s", "latency s", f"× {first}", "TTFT s", "TPOT ms", "length", "τ"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for rate in ratios:
        for name, by_rate in summaries.items():
            s = by_rate[rate]
            faster = ratios[rate].get(name)
            table.add_row(
                f"{rate:g}",
                name,
                f"{s.tokens_per_s:.1f}",
                _number(s.latency_s.mean, 2),
                "" if faster is None else f"{faster['mean']:.2f} [{faster['low']:.2f}, {faster['high']:.2f}]",
                f"{_number(s.time_to_first_token_s.p50, 2)}/{_number(s.time_to_first_token_s.p99, 2)}",
                f"{_number(s.time_per_token_s.p50, 0, 1e3)}/{_number(s.time_per_token_s.p99, 0, 1e3)}",
                _number(s.mean_length, 2),
                _number(s.block_efficiency, 2),
            )
    return table


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "–" if value is None else f"{scale * value:.{digits}f}"


def _requests(records: Records) -> list[dict[str, object]]:
    return [
        {"rate": rate, "policy": name, "round": round_, **asdict(request)}
        for rate, by_policy in records.items()
        for name, rounds in by_policy.items()
        for round_, record in enumerate(rounds)
        for request in record.requests
    ]
