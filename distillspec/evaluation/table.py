"""Several drafts side by side, for a terminal or a text file."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from distillspec.evaluation.acceptance import EvaluationResult
from distillspec.types import Interval

SHOWN_GAMMA = 4
HEADINGS = ("α", "ceiling", "greedy", "p(argmax q)", "c", "best γ", "predicted", "measured")


def comparison_table(results: Sequence[EvaluationResult]) -> Table:
    """One row a draft, best acceptance first; speeds are those of batch 1."""
    gamma = min(SHOWN_GAMMA, min((len(result.tau) for result in results), default=SHOWN_GAMMA))
    table = Table(title=_title(results))
    table.add_column("draft", overflow="fold")
    for heading in [*HEADINGS[:4], f"τ({gamma})", *HEADINGS[4:]]:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in sorted(results, key=lambda result: -result.alpha.mean):
        table.add_row(*_row(result, gamma))
    return table


def comparison_text(results: Sequence[EvaluationResult], width: int = 180) -> str:
    """The table as plain text, followed by each draft's verdict."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True)
    console.print(comparison_table(results))
    for result in results:
        for batch, speedup in (result.speedup or {}).items():
            out.write(f"{result.draft}, batch {batch}: {speedup.verdict}\n")
    return out.getvalue()


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
        _with_interval(result.alpha),
        f"{result.ceiling.mean:.3f}",
        f"{result.greedy_agreement.mean:.3f}",
        f"{result.p_of_draft_argmax.mean:.3f}",
        _with_interval(result.tau[gamma - 1], digits=2),
        "-" if cost is None else f"{cost.c:.3f}",
        "-" if speedup is None else str(speedup.best_gamma) if speedup.best_gamma else "none",
        "-" if speedup is None else f"{max(speedup.predicted):.2f}x",
        "-" if measured is None else f"{_with_interval(measured.ratio, digits=2)} at γ={measured.gamma}",
    ]


def _with_interval(interval: Interval, digits: int = 3) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"
