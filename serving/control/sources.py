"""The source that drafts for a row, where several could: the one of the highest expected goodput."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
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
    return row.with_option(best)


def _goodput(row: RowView, option: Option, rows: int, acceptance: AcceptanceEstimate, latency: LatencyModel) -> float:
    survival = acceptance.of_rows([row.with_option(option)])[0, :, 0].cumprod()
    return chain_goodput(survival[: option.limit].tolist(), option, row.context_tokens, rows, latency)


def chain_goodput(survival: Sequence[float], option: Option, context: int, rows: int, latency: LatencyModel) -> float:
    """Return the most tokens a second of a row's chain from one source, in a step in which all rows draft alike.

    Args:
        survival: P(the first 1, 2, … tokens are all accepted). No longer chain is possible.
        context: tokens of the row. Others are taken to be as long.
        rows: of the step.
    """
    every, once_s = rows * context, latency.target.seconds(0, rows)
    own = latency.of_draft(option.at_once, option.source)
    tokens, best = 1.0, 0.0
    for length, survives in enumerate(survival, 1):
        tokens += survives
        drafts = option.drafted_by_model and own.draft is not None
        drafted_s = own.loop_s(rows, every, length) if drafts else latency.draft_free_s
        added_s = latency.target.seconds(0, rows * (1 + length)) - once_s + drafted_s
        best = max(best, tokens / (once_s + added_s + latency.target.per_context * every))
    return best
