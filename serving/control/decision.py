"""Decision of a goodput controller: the lengths of a step, and the reasons for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.offers import StepPlan
from distillspec.serving.control.speculation_policy import SpeculationPolicy
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.live_latency import RowWork

Speculating = Literal["speculating", "exploring", "hoped", "trial", "within bounds", "bounds out of reach"]
Mode = Literal[Speculating, "not worth it", "measuring plain", "nothing to draft for"]


@dataclass(frozen=True)
class Decision:
    """Reasons of a plan: predicted seconds and tokens of the step, and the estimates behind them."""

    mode: Mode
    lengths: tuple[int, ...]  # levels of each row
    shapes: tuple[TreeShape, ...]  # of each row's tree
    rows: tuple[RowView, ...] = field(repr=False)  # that it was decided for, each with its source
    predicted_tokens: float
    predicted_s: float
    plain_tokens_per_s: float
    best_tokens_per_s: float  # of the best lengths, whether they were taken or not
    uncertainty: float  # relative, of the measured goodput
    hazards: tuple[float, ...]
    latency: LatencyModel
    raw: tuple[float, float]  # goodput without speculation and of the best lengths, before what was measured
    slo_violation: float | None = None  # the worst row's expected time per token over its bound, None without bounds

    def holds_for(self, rows: Sequence[RowView], most: int) -> bool:
        """Return True for rows that are planned for as these were: their texts alone have grown.

        A draft that reads long texts first does so in a single step.

        Args:
            most: tokens that a row may draft. Its limit falls with every step, and counts once it is below `most`.
        """
        if not any(self.lengths) and not any(row.max_time_per_token_s for row in rows):
            return [row.sequence_id for row in rows] == [row.sequence_id for row in self.rows]
        own = zip(self.rows, self.lengths, strict=True)
        if any(length and row.drafted_by_model and row.unread_tokens > ALONG for row, length in own):
            return False
        return len(rows) == len(self.rows) and all(_is_alike(*pair, most) for pair in zip(rows, self.rows, strict=True))


class Known(NamedTuple):
    """Estimates and costs that a controller holds at a step."""

    acceptance: AcceptanceEstimate
    latency: LatencyModel
    policy: SpeculationPolicy
    price: float  # tokens a second of the last step's best lengths
    step: int  # its number

    def decision(
        self,
        mode: Mode,
        view: BatchView,
        planned: StepPlan,
        rates: tuple[float, float],
        *,
        promised: float | None = None,
        excess: float | None = None,
    ) -> Decision:
        """Return the decision for a plan.

        Args:
            view: of the step.
            rates: tokens a second without speculation, and by the best plan.
            promised: tokens a second by which speculation is judged. None: those of the best plan.
        """
        plain, best = rates
        rows, shapes = zip(*[(each.row, each.shape) for each in planned.chosen], strict=True) if view.rows else ((), ())
        lengths = tuple(planned.depths)
        prompts_s = self.latency.prompts_s(len(rows), view.prefill_tokens)
        return Decision(
            mode,
            lengths,
            shapes,
            rows,
            planned.expected.tokens,
            planned.expected.seconds + prompts_s + catch_up_s(self.latency, rows, lengths),
            self.policy.plain_rate(plain),
            best * self.policy.gain,
            self.policy.uncertainty,
            tuple(self.acceptance.hazards().tolist()),
            self.latency,
            (plain, best if promised is None else promised),
            excess,
        )


def _is_alike(row: RowView, before: RowView, most: int) -> bool:
    if row.others or row.match or row.likely or row.max_time_per_token_s is not None:
        return False
    grown = before._replace(
        context_tokens=row.context_tokens,
        unread_tokens=row.unread_tokens,
        limit=row.limit,
        left=row.left,
        belief=row.belief,  # evidence of acceptance, which counts in the next plan
    )
    return row == grown and min(row.limit, most) == min(before.limit, most)


def work_of(view: BatchView, plan: Plan, rows: Sequence[RowResult], *, trees: bool) -> list[RowWork]:
    """Return what each row did, for the costs that are learnt from it.

    Args:
        trees: drafts' trees may have siblings. Behind the nodes of another source, a row's last tree is the draft's.
    """
    by_level = trees or any(len(own.trees) > 1 for own in plan.rows)
    return [_work(*each, by_level=by_level) for each in zip(view.rows, plan.rows, rows, strict=True)]


def _work(row: RowView, plan: RowPlan, result: RowResult, *, by_level: bool) -> RowWork:
    drafts = row.drafted_by_model and any(tree.source == row.source for tree in plan.trees)
    reads = None if not by_level else plan.trees[-1].shape.reads[: result.depth] if plan.trees else ()
    unread = row.unread_tokens if drafts else None
    return RowWork(row.context_tokens, result.nodes, unread, row.source, row.at_once, reads)


def catch_up_s(latency: LatencyModel, rows: Sequence[RowView], lengths: Sequence[int]) -> float:
    """Return the seconds of catch-up prefill of the rows that draft models draft for."""
    unread: dict[str, list[int]] = {}
    for row in [row for row, k in zip(rows, lengths, strict=True) if k and row.drafted_by_model]:
        unread.setdefault(row.source, []).append(row.unread_tokens)
    return sum([latency.of_draft(False, source).catch_up_s(own) for source, own in unread.items()])


def drafting_s(view: BatchView, result: StepResult) -> dict[str, float]:
    """Return the seconds of each draft's passes. Those of other sources are left out where they are known."""
    drafts = dict.fromkeys([row.source for row in view.rows if row.drafted_by_model])
    if result.drafted_s:
        return {source: result.drafted_s[source] for source in drafts if source in result.drafted_s}
    return {next(iter(drafts), DRAFT): result.draft_s}
