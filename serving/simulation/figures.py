"""Figures of simulated runs: latencies, throughput and lengths, as a table, a CSV and a plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from rich.table import Table

from distillspec.files import write_csv, write_png
from distillspec.serving.base.acceptance import acceptance_rate
from distillspec.serving.simulation.clock import SimulationResult


@dataclass(frozen=True)
class RunFigures:
    """One policy at one rate. Times are seconds, latency is from arrival to the last token."""

    policy: str
    rate: float | None  # arrivals a second, None for a trace's own
    requests: int
    mean_latency_s: float
    p50_latency_s: float
    p99_latency_s: float
    mean_first_token_s: float
    mean_per_token_s: float  # from the first token to the last, by request
    tokens_per_s: float  # over the whole run
    step_tokens_per_s: float  # while steps ran: goodput
    mean_batch: float  # decoding rows, over steps that decode
    mean_length: float  # verified tokens a decoding row and step
    acceptance_rate: float | None  # per trial
    peak_cache_tokens: int
    preemptions: int
    draft_idle: float = 0.0  # share of the steps' seconds in which drafts wait, for the target above all
    target_idle: float = 0.0  # the same of the target


def figures_of(policy: str, rate: float | None, result: SimulationResult) -> RunFigures:
    """Compute the figures of one run."""
    stats = result.stats
    latency = numpy.array([s.total_s for s in stats], dtype=float)
    first = numpy.array([s.time_to_first_token_s for s in stats], dtype=float)
    outputs = numpy.array([request.output_tokens for request in result.requests])
    several = outputs > 1
    per_token = (latency - first)[several] / (outputs[several] - 1)
    decoding = [step for step in result.steps if step.rows]
    rows = sum(step.rows for step in decoding)
    tried, accepted = sum(sum(s.tried_per_position) for s in stats), sum(s.accepted for s in stats)
    seconds = sum(step.seconds for step in result.steps)
    ended_s = max(step.at_s + step.seconds for step in result.steps)
    return RunFigures(
        policy=policy,
        rate=rate,
        requests=len(stats),
        mean_latency_s=float(latency.mean()),
        p50_latency_s=float(numpy.quantile(latency, 0.5)),
        p99_latency_s=float(numpy.quantile(latency, 0.99)),
        mean_first_token_s=float(first.mean()),
        mean_per_token_s=float(per_token.mean()) if len(per_token) else 0.0,
        tokens_per_s=float(outputs.sum()) / (ended_s - result.requests[0].arrival_s),
        step_tokens_per_s=float(outputs.sum()) / seconds,
        mean_batch=rows / len(decoding) if decoding else 0.0,
        mean_length=sum(step.proposed for step in decoding) / rows if rows else 0.0,
        acceptance_rate=acceptance_rate(accepted, tried),
        peak_cache_tokens=max(step.reserved_tokens for step in result.steps),
        preemptions=sum(s.preemptions for s in stats),
        draft_idle=1 - sum(step.draft_s for step in result.steps) / seconds,
        target_idle=1 - sum(step.target_s for step in result.steps) / seconds,
    )


def table_of(runs: Sequence[RunFigures], title: str) -> Table:
    """Return a table of policies by rate, the least mean latency of each rate marked with a star."""
    best = {rate: min(run.mean_latency_s for run in runs if run.rate == rate) for rate in {run.rate for run in runs}}
    table = Table(title=title)
    table.add_column("req/s", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in ("latency s", "p99 s", "ms/token", "tokens/s", "batch", "length"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        star = " *" if run.mean_latency_s == best[run.rate] else "  "
        table.add_row(
            "trace" if run.rate is None else f"{run.rate:g}",
            run.policy,
            f"{run.mean_latency_s:.3f}{star}",
            f"{run.p99_latency_s:.3f}",
            f"{1e3 * run.mean_per_token_s:.1f}",
            f"{run.tokens_per_s:.0f}",
            f"{run.mean_batch:.1f}",
            f"{run.mean_length:.2f}",
        )
    return table


def write_figures(runs: Sequence[RunFigures], path: Path) -> None:
    """Write a CSV of one line a run, with six significant digits."""
    names = [field.name for field in dataclasses.fields(RunFigures)]
    write_csv(path, names, ([_short(value) for value in dataclasses.astuple(run)] for run in runs))


def plot_latency(runs: Sequence[RunFigures], path: Path, title: str) -> None:
    """Plot mean latency by rate, a line a policy, or bars if there is only one rate."""
    # Imported here: it takes a second, and only this function needs it. No global backend is touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=80, layout="constrained")
    axes = figure.subplots()
    policies = list(dict.fromkeys(run.policy for run in runs))
    if len({run.rate for run in runs}) == 1:
        axes.bar(policies, [run.mean_latency_s for run in runs])
    else:
        for policy in policies:
            own = [run for run in runs if run.policy == policy]
            axes.plot([run.rate or 0 for run in own], [run.mean_latency_s for run in own], marker="o", label=policy)
        axes.set(xlabel="requests a second", yscale="log")
        axes.legend(fontsize="small")
    axes.set(title=title, ylabel="mean latency, s")
    write_png(path, figure)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
