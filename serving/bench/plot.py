"""Plot of `distill bench`: latencies by load, and lengths over time or servers' acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distillspec.files import write_png
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.summary import LoadSummary

BINS = 60  # time bins of the lengths


def plot_load(
    summaries: Mapping[str, Mapping[float, LoadSummary]], longest: Mapping[str, LoadRecord], path: Path
) -> None:
    """Write a PNG.

    Args:
        summaries: by side, then by rate (requests a second).
        longest: by side, the run whose lengths are plotted. Without step records (servers), acceptance is plotted.
        path: of the file.
    """
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    axes = figure.subplots(2, 3)
    panels = (
        ("mean latency, s", lambda s: s.latency_s.mean),
        ("99th percentile of latency, s", lambda s: s.latency_s.p99),
        ("median time to first token, s", lambda s: s.time_to_first_token_s.p50),
        ("mean time per token, s", lambda s: s.time_per_token_s.mean),
        ("output tokens/s", lambda s: s.tokens_per_s),
    )
    for axis, (title, figure_of) in zip(axes.flat, panels, strict=False):
        for name, by_rate in summaries.items():
            axis.plot(list(by_rate), [figure_of(summary) for summary in by_rate.values()], marker="o", label=name)
        axis.set(title=title, xlabel="requests/s", ylim=(0, None))
    if any(record.steps for record in longest.values()):
        _lengths_over_time(axes.flat[5], longest)
    else:
        _acceptance(axes.flat[5], summaries)
    axes.flat[0].legend()
    write_png(path, figure)


def _acceptance(axis: Axes, summaries: Mapping[str, Mapping[float, LoadSummary]]) -> None:
    for name, by_rate in summaries.items():
        known = {rate: s.acceptance for rate, s in by_rate.items() if s.acceptance is not None}
        axis.plot(list(known), list(known.values()), marker="o", label=name)
    axis.set(title="accepted / drafted tokens, where told", xlabel="requests/s", ylim=(0, 1))


def _lengths_over_time(axis: Axes, records: Mapping[str, LoadRecord]) -> None:
    for name, record in records.items():
        steps = [step for step in record.steps if step.rows]
        if not steps:
            continue
        edges = numpy.linspace(0, max(record.seconds, 1e-9), BINS + 1)
        place = numpy.clip(numpy.digitize([step.at_s for step in steps], edges) - 1, 0, BINS - 1)
        drafted = numpy.bincount(place, [step.proposed for step in steps], BINS)
        rows = numpy.bincount(place, [step.rows for step in steps], BINS)
        seen = rows > 0
        axis.step(edges[:-1][seen], drafted[seen] / rows[seen], where="post", label=name)
    axis.set(title="drafted tokens a row, highest load", xlabel="s", ylim=(0, None))
