"""Top of the page: four figures of the best draft, and a sentence on whether speculation pays."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from distillspec.evaluation.speedup import call
from distillspec.report.runs import Json, ReportEntry
from distillspec.report.svg import Number
from distillspec.report.words import DASH, figure, mean_of, span, table, with_span
from distillspec.types import Interval


def headline(entries: Sequence[ReportEntry]) -> str:
    """Return the cards and the verdict of the draft with the highest α. It is named if there are several drafts."""
    best, several = _best(entries), sum(not entry.baseline for entry in entries) > 1
    before = next((entry for entry in entries if entry.baseline and entry.run is best.run), None)
    name = f'<p class="best">Highest acceptance: <b>{escape(best.label)}</b></p>' if several else ""
    cards = "".join(_cards(best.result, before.result if before else None))
    return f'{name}<div class="cards">{cards}</div><p class="verdict">{escape(verdict(best.result))}</p>'


def comparison(entries: Sequence[ReportEntry]) -> str:
    """Return a table with a row a draft: acceptance by every definition, τ at one γ for all, speed-up."""
    gamma = chosen_gamma(_best(entries).result)
    head = [
        "Draft",
        "α",
        "greedy agreement",
        "p(argmax q)",
        "ceiling of α",
        f"τ({gamma})",
        "predicted",
        "measured",
    ]
    return table(head, [_comparison_row(entry, gamma) for entry in entries])


def _comparison_row(entry: ReportEntry, gamma: int) -> list[str]:
    result, measured = entry.result, entry.result.get("measured") or {}
    predicted, best_gamma = best_predicted(result)
    return [
        f'<i class="c{entry.color}"></i>{escape(entry.label)}',
        with_span(result["alpha"]),
        with_span(result.get("greedy_agreement")),
        with_span(result.get("p_of_draft_argmax")),
        figure(mean_of(result.get("ceiling"))),
        figure(tau_at(result, gamma), 2),
        _at_gamma(predicted, best_gamma, predicted_interval(result, best_gamma)),
        _at_gamma(mean_of(measured.get("ratio")), measured.get("gamma"), measured.get("ratio")),
    ]


def chosen_gamma(result: Json) -> int:
    """Return the length to quote: the measured one, else the best at batch 1, else up to 4."""
    measured, advice = result.get("measured") or {}, _batch_one(result)
    gamma = measured.get("gamma") or advice.get("best_gamma") or 4
    return max(1, min(int(gamma), len(result["tau"])))


def tau_at(result: Json, gamma: int) -> Number:
    """Return τ at a length, None beyond the evaluated ones."""
    return mean_of(result["tau"][gamma - 1]) if 1 <= gamma <= len(result["tau"]) else None


def predicted_at(result: Json, gamma: int) -> Number:
    """Return the predicted speed-up at batch 1, None if there is none for this length."""
    predicted = _batch_one(result).get("predicted") or []
    return predicted[gamma - 1] if 1 <= gamma <= len(predicted) else None


def predicted_interval(result: Json, gamma: int | None) -> Json | None:
    """Return the interval of the predicted speed-up at batch 1. Old versions recorded none."""
    intervals = _batch_one(result).get("intervals") or []
    return intervals[gamma - 1] if gamma is not None and 1 <= gamma <= len(intervals) else None


def best_predicted(result: Json) -> tuple[Number, int | None]:
    """Return the highest predicted speed-up at batch 1 and its γ."""
    predicted = [(value, i) for i, value in enumerate(_batch_one(result).get("predicted") or [], 1) if value == value]
    return max(predicted) if predicted else (None, None)


def verdict(result: Json) -> str:
    """Return the evaluation's advice on speculation, and the measured speed-up."""
    advice, measured = _batch_one(result), result.get("measured") or {}
    parts = [str(advice["verdict"]).rstrip(".") + "."] if advice.get("verdict") else []
    if parts and not advice.get("intervals"):
        parts.append("This prediction was recorded without an interval: evaluate again before quoting it.")
    if speed := _measured_speed(measured):
        parts.append(f"Decoding for real {speed}.")
    if (ratio := mean_of(measured.get("served"))) is not None:
        called = _called(measured["served"], measured.get("prompts"))
        parts.append(
            "A server's defaults, which put n-grams beside the draft and choose lengths by goodput, ran at "
            f"{ratio:.2f}×: {called}."
        )
    return " ".join(parts) or "The cost of a draft step was not measured, so this run does not say whether it pays."


def by_position(entries: Sequence[ReportEntry]) -> str:
    """Return one sentence about the best draft: how far acceptance falls along drafted tokens, and what it is worth."""
    best, several = _best(entries), sum(not entry.baseline for entry in entries) > 1
    alphas = [mean_of(alpha) for alpha in position_alphas(best.result)]
    if not alphas:
        return ""
    speed = _measured_speed(best.result.get("measured") or {})
    return (
        (f"{best.label}: the" if several else "The")
        + f" target accepts {figure(alphas[0], 2)} of the tokens drafted first and {figure(alphas[-1], 2)} of those at "
        f"place {len(alphas)}" + (f", and decoding for real {speed}." if speed else ".")
    )


def position_alphas(result: Json) -> list[Json]:
    """Return α of the first, second, … drafted token, of those that the draft can draft."""
    return [alpha for alpha in result.get("alpha_by_position") or [] if mean_of(alpha)]


def _measured_speed(measured: Json) -> str:
    """Return `at γ = 4 ran at 1.19× plain decoding: clearly faster`, empty if nothing was measured."""
    if (ratio := mean_of(measured.get("ratio"))) is None:
        return ""
    called = _called(measured["ratio"], measured.get("prompts"))
    return f"at γ = {measured.get('gamma', DASH)} ran at {ratio:.2f}× plain decoding: {called}"


def _called(ratio: Json, prompts: int | None) -> str:
    """Return what a measured ratio says."""
    low, high = (ratio.get(key, 1.0) for key in ("low", "high"))
    called = call(Interval(ratio["mean"], low, high), prompts)
    return called if called == "too close to call" else f"clearly {called}"


def _best(entries: Sequence[ReportEntry]) -> ReportEntry:
    drafts = [entry for entry in entries if not entry.baseline]
    return max(drafts, key=lambda entry: mean_of(entry.result["alpha"]) or 0.0)


def _cards(after: Json, before: Json | None) -> list[str]:
    gamma = chosen_gamma(after)
    measured, ceiling = after.get("measured") or {}, mean_of(after.get("ceiling"))
    bounds = span(after["alpha"])
    alpha = [f"95 % interval {bounds}" if bounds else ""]
    alpha += [f"ceiling {ceiling:.3f}"] if ceiling is not None and ceiling < 0.9995 else []
    tau = [f"tokens a verification at γ = {gamma}", f"of at most {gamma + 1}"]
    return [
        _card("Acceptance rate α", _change(before, after, lambda r: mean_of(r["alpha"]), 3), alpha),
        _card("Block efficiency τ", _change(before, after, lambda r: tau_at(r, gamma), 2), tau),
        _card("Predicted speed-up", figure(predicted_at(after, gamma), 2, "×"), _predicted_text(after, gamma)),
        _card("Measured speed-up", figure(mean_of(measured.get("ratio")), 2, "×"), _measured_text(measured)),
    ]


def _predicted_text(result: Json, gamma: int) -> list[str]:
    value, best = best_predicted(result)
    if value is None:
        return ["the cost was not measured"]
    bounds, low_high = span(predicted_interval(result, gamma), 2, "×"), _batch_one(result).get("best_gamma_range")
    lines = [f"batch 1, γ = {gamma}", f"95 % interval {bounds}" if bounds else "without an interval"]
    if best != gamma:
        lines.append(f"best {value:.2f}× at γ = {best}")
    if low_high and low_high[0] != low_high[1]:
        lines.append(f"the best γ is between {low_high[0]} and {low_high[1]}")
    return lines


def _change(before: Json | None, after: Json, read: Any, digits: int) -> str:
    now = figure(read(after), digits)
    if before is None or read(before) is None:
        return now
    return f'<span class="was">{figure(read(before), digits)} →</span> {now}'


def _measured_text(measured: Json) -> list[str]:
    if not measured:
        return ["not measured"]
    speeds = [measured.get(f"{kind}_tokens_per_s") for kind in ("plain", "speculative")]
    bounds, served = span(measured.get("ratio"), 2, "×"), measured.get("served")
    return [
        f"{figure(speeds[0], 1)} → {figure(speeds[1], 1)} tokens/s",
        f"95 % interval {bounds}" if bounds else "",
        f"{measured['prompts']} prompts" if measured.get("prompts") else "",
        f"as served: {figure(mean_of(served), 2, '×')} {span(served, 2, '×')}" if served else "",
    ]


def _at_gamma(value: Number, gamma: int | None, interval: Json | None = None) -> str:
    if not gamma or value is None:
        return figure(value, 2, "×")
    beside = ", ".join(filter(None, [span(interval, 2), f"γ = {gamma}"]))
    return f'{figure(value, 2, "×")} <span class="span">{beside}</span>'


def _card(name: str, value: str, below: Sequence[str]) -> str:
    missing = " missing" if value == DASH else ""
    lines = "<br>".join(escape(line) for line in below if line)
    return f'<div class="card{missing}"><h3>{escape(name)}</h3><p class="value">{value}</p><p>{lines}</p></div>'


def _batch_one(result: Json) -> Json:
    return (result.get("speedup") or {}).get("1") or {}
