"""Several drafts side by side, for a terminal or a text file."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from distillspec.evaluation.acceptance import EvaluationResult
from distillspec.evaluation.measured import MeasuredSpeedup
from distillspec.evaluation.pairs import SHOWN_GAMMA, SHOWN_POSITIONS, Pair
from distillspec.evaluation.speedup import Speedup, call
from distillspec.types import Interval

OWN_TOKEN = "τ counts the target's own token of each pass: τ − 1 drafted tokens are accepted"
AS_SERVED = "as served, with n-grams beside the draft and lengths by goodput,"
HEADINGS = ("kind", "α", "α by position", "ceiling", "greedy", "p(argmax q)", "c", "best γ", "predicted", "measured")


def comparison_table(results: Sequence[EvaluationResult]) -> Table:
    """Return a table with one row a draft, best acceptance first. Speeds are those of batch 1."""
    gamma = min(SHOWN_GAMMA, min((len(result.tau) for result in results), default=SHOWN_GAMMA))
    table = Table(title=_title(results))
    table.add_column("draft", overflow="fold")
    for heading in [*HEADINGS[:6], f"τ({gamma})", *HEADINGS[6:]]:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in sorted(results, key=lambda result: -result.alpha.mean):
        table.add_row(*_row(result, gamma))
    return table


def comparison_text(results: Sequence[EvaluationResult], pairs: Sequence[Pair] = (), width: int = 220) -> str:
    """Return the table as plain text, followed by the notes on each draft and each pair."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True)
    console.print(comparison_table(results))
    for result in results:
        out.writelines(f"{result.draft}, {line}\n" for line in timing_lines(result))
    out.writelines(f"{pair.sentence}\n" for pair in pairs)
    out.write(f"{OWN_TOKEN}\n")
    out.writelines(f"{line}\n" for line in dict.fromkeys(map(cut_line, results)) if line)
    return out.getvalue()


def timing_lines(result: EvaluationResult) -> list[str]:
    """Return lines that say if speculation pays, as predicted at each batch size and as measured."""
    lines = [f"batch {batch}: {speedup.verdict}" for batch, speedup in (result.speedup or {}).items()]
    if result.measured is not None:
        lines += _measured_lines(result.measured, 1)
    for batch, measured in (result.measured_at or {}).items():
        lines += _measured_lines(measured, batch)
    return lines


def _measured_lines(measured: MeasuredSpeedup, batch: int) -> list[str]:
    by = f"{batch} at a time " if batch > 1 else ""
    on = f"groups of {batch} prompts" if batch > 1 else "prompts"
    lines = [_measured_line(f"{by}with {measured.gamma} drafted", measured.ratio, measured.prompts, on)]
    if measured.served is not None:
        lines.append(_measured_line(f"{by}{AS_SERVED}", measured.served, measured.prompts, on))
    return lines


def _measured_line(how: str, ratio: Interval, prompts: int | None, named: str) -> str:
    on = f" on {prompts} {named}" if prompts is not None else ""
    speed = f"{_with_interval(ratio, digits=2)} times plain decoding"
    return f"measured: decoding {how} ran at {speed}{on}: {call(ratio, prompts)}."


def cut_line(result: EvaluationResult) -> str:
    """Return a line on the share of answers that a limit cut, empty if none was."""
    if not result.cut:
        return ""
    return f"{result.cut:.0%} of the held-out answers were cut at the token limit: how answers end is hardly judged."


def _title(results: Sequence[EvaluationResult]) -> str:
    policies = {result.policy for result in results}
    if len(policies) != 1:
        return "Drafts under different policies"
    policy = next(iter(policies))
    if policy.is_greedy:
        return "greedy"
    nucleus = policy.top_p if policy.top_p < 1 else 0
    filters = (("top-k", policy.top_k), ("top-p", nucleus), ("min-p", policy.min_p))
    named = [f"{name} {value}" for name, value in filters if value]
    return ", ".join([f"temperature {policy.temperature}", *named])


def _row(result: EvaluationResult, gamma: int) -> list[str]:
    cost, speedup = (result.cost or {}).get(1), (result.speedup or {}).get(1)
    measured = result.measured
    return [
        result.draft,
        result.kind or "-",
        _with_interval(result.alpha),
        _by_position(result),
        f"{result.ceiling.mean:.3f}",
        f"{result.greedy_agreement.mean:.3f}",
        f"{result.p_of_draft_argmax.mean:.3f}",
        _with_interval(result.tau[gamma - 1], digits=2),
        "-" if cost is None else f"{cost.c:.3f}",
        "-" if speedup is None else _best_length(speedup),
        "-" if speedup is None else _best_prediction(speedup),
        "-" if measured is None else f"{_with_interval(measured.ratio, digits=2)} at γ={measured.gamma}",
    ]


def _by_position(result: EvaluationResult) -> str:
    """Return α of the first drafted tokens, `0.51, 0.43, 0.40`."""
    positions = range(1, min(SHOWN_POSITIONS, len(result.tau)) + 1)
    return ", ".join(f"{result.alpha_at(position).mean:.2f}" for position in positions)


def _best_length(speedup: Speedup) -> str:
    if speedup.call != "faster":
        return "none" if speedup.call == "slower" else speedup.call
    low, high = speedup.best_gamma_range
    return f"{speedup.best_gamma}" if low == high else f"{speedup.best_gamma} ({low}-{high})"


def _best_prediction(speedup: Speedup) -> str:
    best = max(speedup.intervals, key=lambda interval: interval.mean)
    return f"{best.mean:.2f}x [{best.low:.2f}, {best.high:.2f}]"


def _with_interval(interval: Interval, digits: int = 3) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"
