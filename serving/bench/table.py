"""Tables of `distill bench`: a row for each load and side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from distillspec.serving.bench.summary import LoadSummary, Spread

Summaries = Mapping[str, Mapping[float, LoadSummary]]  # by side, then requests a second
Ratios = Mapping[float, Mapping[str, Mapping[str, float]]]  # by requests a second, then side: times faster
Column = tuple[str, Callable[[LoadSummary], str]]


def engine_table(summaries: Summaries, ratios: Ratios, first: str) -> Table:
    """Return the table of one engine's policies."""
    further: tuple[Column, ...] = (
        ("length", lambda s: _number(s.mean_length, 2)),
        ("τ", lambda s: _number(s.block_efficiency, 2)),
    )
    title = "mean latency, with 50 and 99 % quantiles of time to first token and per token"
    latency: Column = ("latency s", lambda s: _number(s.latency_s.mean, 2))
    return _table(title, "policy", latency, further, summaries, ratios, first)


def source_lines(summaries: Summaries) -> list[str]:
    """Return a line for each side and load whose tokens were accepted of several sources, the most first."""
    lines = []
    for name, by_rate in summaries.items():
        for rate, summary in by_rate.items():
            counts = sorted(summary.accepted_by_source.items(), key=lambda counted: -counted[1])
            if len(counts) > 1:
                shown = ", ".join(f"{source} {count}" for source, count in counts)
                lines.append(f"{rate:g} requests/s, {name}: accepted tokens of {shown}")
    return lines


def server_table(summaries: Summaries, ratios: Ratios, first: str) -> Table:
    """Return the table of servers."""
    further: tuple[Column, ...] = (
        ("accepted", lambda s: "–" if s.acceptance is None else f"{100 * s.acceptance:.0f} %"),
        ("answered", lambda s: str(s.requests)),
        ("failed", lambda s: str(s.failed)),
    )
    title = "50, 90 and 99 % quantiles of latency; 50 and 99 % of time to first token and per token"
    return _table(title, "server", ("latency s", _latencies), further, summaries, ratios, first)


def _table(
    title: str,
    side: str,
    latency: Column,
    further: tuple[Column, ...],
    summaries: Summaries,
    ratios: Ratios,
    first: str,
) -> Table:
    columns: tuple[Column, ...] = (
        ("TTFT s", lambda s: _pair(s.time_to_first_token_s, 2)),
        ("TPOT ms", lambda s: _pair(s.time_per_token_s, 0, 1e3)),
        *further,
    )
    table = Table(title=title)
    for name in ("requests/s", side, "tokens/s", latency[0], f"× {first}", *(name for name, _ in columns)):
        table.add_column(name, justify="left" if name == side else "right", overflow="fold")
    for rate, faster_than_first in ratios.items():
        for name, by_rate in summaries.items():
            summary = by_rate[rate]
            shown = [figure(summary) for _, figure in columns]
            faster = _interval(faster_than_first.get(name))
            table.add_row(f"{rate:g}", name, f"{summary.tokens_per_s:.1f}", latency[1](summary), faster, *shown)
    return table


def _latencies(summary: LoadSummary) -> str:
    spread = summary.latency_s
    return "/".join(_number(value, 2) for value in (spread.p50, spread.p90, spread.p99))


def _pair(spread: Spread, digits: int, scale: float = 1.0) -> str:
    return f"{_number(spread.p50, digits, scale)}/{_number(spread.p99, digits, scale)}"


def _interval(faster: Mapping[str, float] | None) -> str:
    return "" if faster is None else f"{faster['mean']:.2f} [{faster['low']:.2f}, {faster['high']:.2f}]"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "–" if value is None else f"{scale * value:.{digits}f}"
