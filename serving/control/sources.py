"""The source that drafts for a row, where several could: the one of the highest expected goodput."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.base import Option, RowView, evidence
from distillspec.serving.costs.latency import LatencyModel


def choose_sources(
    rows: Sequence[RowView], acceptance: AcceptanceEstimate, latency: LatencyModel
) -> tuple[RowView, ...]:
    """Return the rows, each with the source that is expected to bring it the most tokens a second.

    Costs are a row's share of a step in which all rows draft alike.
    """
    if not any(row.others for row in rows):
        return tuple(rows)
    return tuple([_best(row, len(rows), acceptance, latency) if row.others else row for row in rows])


def _best(row: RowView, rows: int, acceptance: AcceptanceEstimate, latency: LatencyModel) -> RowView:
    best = max(row.options, key=lambda option: _goodput(row, option, rows, acceptance, latency))
    return row._replace(**best._asdict(), others=())


def _goodput(row: RowView, option: Option, rows: int, acceptance: AcceptanceEstimate, latency: LatencyModel) -> float:
    """Return the most tokens a second of a chain from one source."""
    survival = acceptance.survival([row.sequence_id], [evidence(option)] if option.match else None)[0]
    context, once_s = rows * row.context_tokens, latency.target.seconds(0, rows)
    tokens, best = 1.0, 0.0
    for length, survives in enumerate(survival[: option.limit].tolist(), 1):
        tokens += survives
        drafted_s = latency.draft_free_s
        if option.drafted_by_model and latency.draft is not None:
            drafted_s = latency.of_draft(option.at_once).loop_s(rows, context, length)
        added_s = latency.target.seconds(0, rows * (1 + length)) - once_s + drafted_s
        best = max(best, tokens / (once_s + added_s + latency.target.per_context * context))
    return best
