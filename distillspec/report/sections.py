"""Middle of the page: training curves, acceptance, block efficiency, speed-up and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from distillspec.report.bar_chart import Bar, bar_chart, heat_map
from distillspec.report.headline import by_position, position_alphas
from distillspec.report.line_chart import Line, Point, line_chart
from distillspec.report.runs import Json, ReportEntry, Run
from distillspec.report.svg import Number, is_number
from distillspec.report.words import chart, figure, mean_of, table, with_span

MAX_POINTS = 150  # longer curves are averaged in buckets: more cannot be seen, and the page stays small
MAX_BARS = 4  # more drafts than this share a heat map


def training(runs: Sequence[Run]) -> str:
    """Return charts of loss and acceptance against minutes, and a table of the training runs."""
    trained = [run for run in runs if run.command == "train"]
    if not trained:
        return ""
    if not any(run.metrics for run in trained):
        return '<p class="missing">No metrics.jsonl was found, so there are no training curves.</p>'
    colors = {run.name: i % 6 + 1 for i, run in enumerate(trained)}
    losses = [_curve(run, "train/loss", colors[run.name]) for run in trained]
    alphas = [_curve(run, "train/alpha", colors[run.name], faint=True) for run in trained]
    alphas += [_evaluated(run, colors[run.name]) for run in trained]
    legend = [(run.name, colors[run.name]) for run in trained]
    x, end = "minutes", max([_minutes(row) or 0.0 for run in trained for row in run.metrics], default=0.0)
    loss = line_chart(losses, title="Training loss", x_label=x, y_label="loss, nats", x_range=(0.0, end))
    alpha = line_chart(alphas, title="Acceptance", x_label=x, y_label="α", x_range=(0.0, end), y_from=0.0)
    note = "Faint: on training batches. Dots with band: on held-out prompts, 95 % interval."
    charts = chart("Loss", loss, legend) + chart("Acceptance rate α", alpha, legend, note)
    return f'<div class="pair">{charts}</div>{_training_table(trained)}'


def acceptance(entries: Sequence[ReportEntry]) -> str:
    """Return a chart of α by domain: bars, or a heat map of many drafts. Empty for a single domain."""
    domains = sorted({domain for entry in entries for domain in _domains(entry.result)})
    if len(domains) < 2:
        return ""
    intervals = {domain: [_domains(entry.result).get(domain) for entry in entries] for domain in domains}
    return _grouped("α by domain", "Acceptance by domain", entries, intervals)


def acceptance_by_position(entries: Sequence[ReportEntry]) -> str:
    """Return a chart of α of the first, second, … drafted token. Empty where it is the same for all of them.

    A sentence tells what the best draft's is worth.
    """
    if not any(len({mean_of(alpha) for alpha in position_alphas(entry.result)}) > 1 for entry in entries):
        return ""
    longest = max(len(position_alphas(entry.result)) for entry in entries)
    intervals = {
        f"token {index + 1}": [dict(enumerate(position_alphas(entry.result))).get(index) for entry in entries]
        for index in range(longest)
    }
    return _grouped("α by drafted token", "Acceptance by drafted token", entries, intervals, by_position(entries))


def _grouped(
    heading: str,
    title: str,
    entries: Sequence[ReportEntry],
    intervals: Mapping[str, Sequence[Json | None]],
    note: str = "",
) -> str:
    """Return a chart of an interval of each entry by group: bars, or a heat map of many drafts."""
    if len(entries) > MAX_BARS:
        values = [[mean_of(of_group[number]) for of_group in intervals.values()] for number in range(len(entries))]
        return chart(heading, heat_map([e.label for e in entries], list(intervals), values, title=title), note=note)
    groups = [(name, list(map(_interval_bar, entries, of_group))) for name, of_group in intervals.items()]
    return chart(heading, bar_chart(groups, title=title), [(entry.label, entry.color) for entry in entries], note)


def block_efficiency(entries: Sequence[ReportEntry]) -> str:
    """Return a chart of τ against γ, one line a draft."""
    longest = max(len(entry.result["tau"]) for entry in entries)
    lines = []
    for entry in entries:
        points = [Point(i + 1, **_bounds(interval)) for i, interval in enumerate(entry.result["tau"])]
        lines.append(Line(entry.label, points, entry.color))
    picture = line_chart(
        lines,
        title="Block efficiency by speculation length",
        x_label="speculation length γ",
        y_label="tokens a verification, τ",
        x_ticks=range(1, longest + 1),
        y_from=1.0,
    )
    return chart("Block efficiency τ by γ", picture, [(entry.label, entry.color) for entry in entries])


def speed_ups(entries: Sequence[ReportEntry]) -> list[str]:
    """Return a chart of the predicted speed-up against γ for each batch size. Measured ones are circles."""
    batches = sorted({batch for entry in entries for batch in entry.result.get("speedup") or {}}, key=int)
    return [_speed_up(entries, batch) for batch in batches]


def cost_table(entries: Sequence[ReportEntry]) -> str:
    """Return a table of step times, c and β(k) by draft and batch size."""
    costed = [entry for entry in entries if entry.result.get("cost")]
    # A baseline has the shape, so the cost, of the draft that was trained from it.
    costed = [entry for entry in costed if not entry.baseline] or costed
    if not costed:
        return '<p class="missing">Costs were not measured (evaluation.measure_cost=false).</p>'
    longest = max(len(cost.get("beta") or []) for entry in costed for cost in entry.result["cost"].values())
    lengths = [k for k in (1, 2, 4, 8) if k < longest]
    head = ["Draft", "batch", "target step", "draft step", "c", *(f"β({k})" for k in lengths)]
    return table(head, [row for entry in costed for row in _cost_rows(entry, lengths)]) + (
        '<p class="note">c is a draft step and β(k) a verification of k drafted tokens, both in steps of the '
        "target, with 95 % intervals of what was measured in pairs with plain steps; a verification below 1 is counted "
        "as 1. Predicted speed-up is τ / (γ·c + β(γ)); speculation pays where β(γ) &lt; τ − γ·c.</p>"
    )


def _cost_rows(entry: ReportEntry, lengths: Sequence[int]) -> list[list[str]]:
    """Return a row for each batch size. Only the first has the draft's label."""
    by_batch = sorted(entry.result["cost"].items(), key=lambda item: int(item[0]))
    return [
        [
            "" if i else escape(entry.label),
            escape(str(batch)),
            _milliseconds(cost.get("target_step_s")),
            _milliseconds(cost.get("draft_step_s")),
            with_span(_ratio(cost, 0)),
            *(with_span(_ratio(cost, k), 2) for k in lengths),
        ]
        for i, (batch, cost) in enumerate(by_batch)
    ]


def _ratio(cost: Json, k: int) -> Json:
    """Return c (k = 0) or β(k), with its measured bounds if they were recorded."""
    beta, measured = cost.get("beta") or [], cost.get("measured") or []
    value = cost.get("c") if k == 0 else beta[k] if k < len(beta) else None
    bounds = measured[k] if k < len(measured) else {}
    share = cost.get("plain_share") or 1.0
    return {"mean": value, **{end: bounds[end] / share for end in ("low", "high") if is_number(bounds.get(end))}}


def _speed_up(entries: Sequence[ReportEntry], batch: str) -> str:
    by_entry = [(entry, _speed_up_lines(entry, batch)) for entry in entries]
    lines = [line for _, entry_lines in by_entry for line in entry_lines]
    longest = max((len(line.points) for line in lines), default=1)
    picture = line_chart(
        lines,
        title=f"Speed-up at batch {batch}",
        x_label="speculation length γ",
        y_label="speed-up, times plain decoding",
        x_ticks=range(1, max(longest, 2) + 1),
        reference=1.0,
    )
    note = "Dashed: plain decoding."
    if any(not line.joined for line in lines):
        note = "Lines: predicted. Circles: measured. " + note
    note = "Bands and whiskers: 95 % intervals. " + note
    heading = f"Speed-up by γ, batch {batch}"
    return chart(heading, picture, [(entry.label, entry.color) for entry, entry_lines in by_entry if entry_lines], note)


def _speed_up_lines(entry: ReportEntry, batch: str) -> list[Line]:
    """Return the predicted line and the measured point, if there is one. Empty without a prediction."""
    advice = (entry.result.get("speedup") or {}).get(batch) or {}
    predicted, intervals = advice.get("predicted"), advice.get("intervals")
    if not predicted:
        return []
    bounds = [_bounds(i) | {"y": y} for i, y in zip(intervals or [None] * len(predicted), predicted, strict=True)]
    lines = [Line(entry.label, [Point(i, **b) for i, b in enumerate(bounds, 1)], entry.color)]
    measured = entry.result.get("measured") if batch == "1" else (entry.result.get("measured_at") or {}).get(batch)
    if measured:
        point = Point(measured.get("gamma"), **_bounds(measured.get("ratio")))
        lines.append(Line(f"{entry.label}, measured", [point], entry.color, joined=False))
    return lines


def _training_table(runs: Sequence[Run]) -> str:
    head = ["Run", "steps", "tokens", "minutes", "tokens/s", "best step", "best α", "ended by"]
    rows = []
    for run in runs:
        summary, best = run.summary, run.summary.get("best") or {}
        rows.append(
            [
                escape(run.name),
                figure(summary.get("steps"), 0),
                figure(summary.get("tokens"), 0),
                figure(summary.get("minutes"), 1),
                figure(summary.get("tokens_per_s"), 0),
                figure(best.get("step"), 0),
                figure(best.get("alpha")),
                escape(str(summary.get("stopped_by", "–"))),
            ]
        )
    return table(head, rows)


def _curve(run: Run, key: str, color: int, *, faint: bool = False) -> Line:
    points = [Point(_minutes(row), row[key]) for row in run.metrics if _number(row.get(key)) is not None]
    return Line(run.name, _thinned(points), color, markers=False, faint=faint)


def _evaluated(run: Run, color: int) -> Line:
    points = [
        Point(
            _minutes(row),
            row["eval/alpha"],
            _number(row.get("eval/alpha_low")),
            _number(row.get("eval/alpha_high")),
        )
        for row in run.metrics
        if _number(row.get("eval/alpha")) is not None
    ]
    return Line(f"{run.name}, held out", points, color)


def _minutes(row: Json) -> Number:
    seconds = _number(row.get("seconds"))
    return None if seconds is None else seconds / 60


def _number(value: object) -> Number:
    """Return a finite number or None. The NaN of a skipped step would spoil the averages around it."""
    return float(value) if is_number(value) else None


def _thinned(points: list[Point]) -> list[Point]:
    """Average neighbours so that at most MAX_POINTS points are left."""
    points = [p for p in points if p.x is not None]
    size = -(-len(points) // MAX_POINTS) or 1
    pieces = [points[i : i + size] for i in range(0, len(points), size)]
    return [Point(*(sum(getattr(p, axis) for p in piece) / len(piece) for axis in "xy")) for piece in pieces]


def _domains(result: Json) -> Json:
    return result.get("alpha_by_domain") or {}


def _interval_bar(entry: ReportEntry, interval: Json | None) -> Bar:
    bounds = _bounds(interval)
    return Bar(entry.label, bounds["y"], bounds["low"], bounds["high"], entry.color)


def _bounds(interval: Json | None) -> dict[str, Number]:
    interval = interval or {}
    return {"y": interval.get("mean"), "low": interval.get("low"), "high": interval.get("high")}


def _milliseconds(seconds: Number) -> str:
    return figure(None if seconds is None else 1000 * seconds, 1, " ms")
