"""Lengths that maximise goodput, tokens a second (SmartSpec, Liu et al. 2024), by row and step, and never below not
speculating for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from distillspec.config.engine import LENGTHS
from distillspec.errors import ConfigError
from distillspec.serving.base.catch_up import catch_up_cost
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.allocation import Allocation, Batch, Floats, best_by_row, best_for_all, expected, plain
from distillspec.serving.control.base import (
    BatchView,
    Plan,
    RowPlan,
    RowResult,
    RowView,
    StepResult,
    decoding_rows,
)
from distillspec.serving.control.bounded import best_by_row_within, best_for_all_within, row_tokens, violation
from distillspec.serving.control.calibration import CostCalibration
from distillspec.serving.control.latency import ForwardCost, LatencyModel, guessed
from distillspec.serving.control.speculation_policy import SpeculationPolicy

GUESS_CONFIDENCE, PROFILE_CONFIDENCE = 1e-4, 20.0  # measured steps that they are worth
TRY_LENGTH = 2  # tokens a row drafts on trial
WITHIN = 1 + 1e-9  # of a bound
FORGET_ROWS_EVERY = 256  # steps
WARM_UP = (0, 1, 2, 4) * 6  # lengths of an unknown machine's first steps: its costs must be seen before they are judged
Mode = Literal[
    "learning costs",
    "speculating",
    "not worth it",
    "trial",
    "measuring plain",
    "nothing to draft for",
    "within bounds",
    "bounds out of reach",
]


@dataclass(frozen=True)
class Decision:
    """Reasons of a plan: predicted seconds and tokens of the step, and the estimates behind them."""

    mode: Mode
    lengths: tuple[int, ...]
    predicted_tokens: float
    predicted_s: float
    plain_tokens_per_s: float
    best_tokens_per_s: float  # of the best lengths, whether they were taken or not
    uncertainty: float  # relative, of the measured goodput
    hazards: tuple[float, ...]
    target: ForwardCost
    draft: ForwardCost | None
    raw: tuple[float, float]  # goodput without speculation and of the best lengths, before what was measured
    slo_violation: float | None = None  # the worst row's expected time per token over its bound, None without bounds


class GoodputController:
    """Plans the lengths of highest expected goodput, and learns acceptance and costs from every step.

    Args:
        longest: the most tokens a row may draft.
        latency: a profile's costs. None: learnt from the first steps, also those that read prompts.
        lengths: `request` gives each row its own, `step` one for all, `global` one acceptance as well.
        drafts_with_model: False where proposals cost next to nothing (prompt lookup).
        acceptance: the estimate of acceptance, None for the default.
        max_time_per_token_s: bound on every row's expected time per output token, unless the row has its own. If no
            lengths keep it, those with the worst row nearest to it are chosen. Steps that learn costs ignore it.
        guess: assumed costs before steps were measured, where there is no `latency`. See `guessed`.
    """

    def __init__(
        self,
        longest: int,
        latency: LatencyModel | None = None,
        *,
        lengths: str = "request",
        drafts_with_model: bool = True,
        acceptance: AcceptanceEstimate | None = None,
        max_time_per_token_s: float | None = None,
        guess: LatencyModel | None = None,
    ) -> None:
        if longest < 0:
            raise ConfigError(f"longest={longest} must be at least 0")
        if lengths not in LENGTHS:
            raise ConfigError(f"lengths={lengths} must be one of {', '.join(LENGTHS)}")
        if max_time_per_token_s is not None and not max_time_per_token_s > 0:
            raise ConfigError(f"max_time_per_token_s={max_time_per_token_s} must be above 0 seconds")
        self.longest, self.max_time_per_token_s = longest, max_time_per_token_s
        self._choose, self._choose_within = (
            (best_by_row, best_by_row_within) if lengths == "request" else (best_for_all, best_for_all_within)
        )
        prior, confidence = latency, PROFILE_CONFIDENCE
        if prior is None:
            prior, confidence = guess or guessed(), GUESS_CONFIDENCE
        prompts = prior.target if latency is None and prior.prefill is None else None
        self._target = CostCalibration(prior.target, confidence=confidence, prompts=prompts)
        self._draft: CostCalibration | None = None
        if drafts_with_model and prior.draft is not None:
            self._draft = CostCalibration(prior.draft, confidence=confidence)
        self._draft_free_s, self._prefill = prior.draft_free_s, prior.prefill
        shared = {"strength": float("inf")} if lengths == "global" else {}
        self.acceptance = AcceptanceEstimate(longest, **shared) if acceptance is None else acceptance
        self._steps = 0
        self._to_learn = list(WARM_UP) if latency is None else []
        self._latency: LatencyModel | None = None
        self._speculation = SpeculationPolicy()

    @property
    def latency(self) -> LatencyModel:
        """The present estimate of the costs of steps."""
        if self._latency is None:
            draft = None if self._draft is None else self._draft.cost
            prefill = self._target.prompts or self._prefill
            self._latency = LatencyModel(self._target.cost, draft, self._draft_free_s, prefill)
        return self._latency

    def plan(self, view: BatchView) -> Plan:
        decision = self.decide(view)
        rows = tuple(map(RowPlan, [row.sequence_id for row in view.rows], decision.lengths))
        return Plan(rows, decision.predicted_tokens, decision.predicted_s, decision)

    def decide(self, view: BatchView) -> Decision:
        """Plan lengths, with reasons. Pure.

        Prompt tokens read in the same step cost the same whatever is drafted, now or in another step. Counted in, they
        would make each drafted token look cheap (the ratio is low anyway), so lengths are chosen without them. Bounds
        on times hold for the whole step.
        """
        batch = self._batch(view)
        whole = batch._replace(prefill_tokens=view.prefill_tokens)
        nothing = plain(batch)
        best = self._choose(batch)
        bounds = self._bounds(view.rows)
        mode, planned = self._pick(view, batch, best, nothing)
        planned = expected(whole, planned.lengths) if view.prefill_tokens else planned
        if bounds is not None and mode != "learning costs" and self._violation(whole, planned, bounds) > WITHIN:
            free = expected(whole, best.lengths) if view.prefill_tokens else best
            mode, planned = self._pick_within(whole, bounds, free)
        return Decision(
            mode,
            tuple(planned.lengths.tolist()),
            planned.tokens,
            planned.seconds + self._catch_up_s(view.rows, planned.lengths.tolist()),
            self._speculation.plain_rate(nothing.goodput),
            best.goodput * self._speculation.gain,
            self._speculation.uncertainty,
            tuple(self.acceptance.hazards.tolist()),
            batch.latency.target,
            batch.latency.draft,
            (nothing.goodput, best.goodput),
            None if bounds is None else self._violation(whole, planned, bounds),
        )

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        return tuple([row.length for row in plan.rows])

    def observe(self, result: StepResult) -> None:
        """Learn from a step: acceptance, costs, and errors of the prediction."""
        rows, prompts_s = decoding_rows(result), self._prompts_s(result)
        self._latency = None
        self._learn_costs(result, [row.proposed for row in rows])
        matches = {row.sequence_id: row.match for row in result.view.rows if row.match}
        self.acceptance.observe(rows, [matches.get(row.sequence_id, 0) for row in rows] if matches else None)
        if rows:
            self._compare_with_prediction(result, rows, prompts_s)
        self._steps += 1
        if self._steps % FORGET_ROWS_EVERY == 0:
            self.acceptance.keep_only([row.sequence_id for row in result.view.rows])

    def draft_changed(self) -> None:
        """Forget the old draft's acceptance and measured gain."""
        self.acceptance.reset()
        self._speculation = SpeculationPolicy()

    def _batch(self, view: BatchView) -> Batch:
        columns: Sequence[tuple[Any, ...]] = list(zip(*view.rows, strict=True)) or [()] * len(RowView._fields)
        names, contexts, limits, by_model, matches, *_ = columns
        return Batch(
            self.acceptance.survival(names, matches if any(matches) else None),
            numpy.minimum(numpy.array(limits, dtype=numpy.int64), self.longest),
            numpy.array(contexts, dtype=numpy.int64),
            self.latency,
            0,
            None if all(by_model) else numpy.array(by_model),
        )

    def _pick(self, view: BatchView, batch: Batch, best: Allocation, nothing: Allocation) -> tuple[Mode, Allocation]:
        if not batch.limits.any():
            return "nothing to draft for", nothing
        if self._to_learn:
            return "learning costs", self._warm_up(batch)
        policy = self._speculation
        if policy.speculates and best.lengths.any():
            return ("measuring plain", nothing) if policy.plain_is_due else ("speculating", best)
        if not policy.trial_is_due:
            return "not worth it", nothing
        tried = expected(batch, numpy.minimum(batch.limits, TRY_LENGTH))
        goes_on = policy.affords(tried, nothing, self._catch_up_s(view.rows, tried.lengths.tolist()))
        return ("trial", tried) if goes_on else ("not worth it", nothing)

    def _pick_within(self, batch: Batch, bounds: Floats, free: Allocation) -> tuple[Mode, Allocation]:
        """Choose lengths where the unbounded choice breaks bounds on the time per token."""
        found = self._choose_within(batch, bounds, free)
        return "within bounds" if self._violation(batch, found, bounds) <= WITHIN else "bounds out of reach", found

    def _catch_up_s(self, rows: Sequence[RowView], lengths: Sequence[int]) -> float:
        """Return the seconds of catch-up prefill of the rows that draft."""
        return self.latency.catch_up_s(_unread(rows, lengths))

    def _warm_up(self, batch: Batch) -> Allocation:
        return expected(batch, numpy.minimum(batch.limits, self._to_learn[0]))

    def _bounds(self, rows: Sequence[RowView]) -> Floats | None:
        """Return the bound on seconds a token of each row, infinity for none. None if no row has one."""
        default = self.max_time_per_token_s
        if default is None and all(row.max_time_per_token_s is None for row in rows):
            return None
        own = [row.max_time_per_token_s or default or numpy.inf for row in rows]
        return numpy.array(own, dtype=numpy.float64)

    def _violation(self, batch: Batch, planned: Allocation, bounds: Floats) -> float:
        tokens = row_tokens(batch)[numpy.arange(len(bounds)), planned.lengths]
        return violation(tokens, planned.seconds, bounds)

    def _learn_costs(self, result: StepResult, proposed: Sequence[int]) -> None:
        contexts = [row.context_tokens for row in result.view.rows]
        prompts, learns_prompts = result.prefill_tokens, self._target.prompts is not None
        if len(proposed) != len(contexts) or (prompts and not learns_prompts):
            return
        tokens = sum(proposed) + len(proposed)
        self._target.observe(sum(contexts), tokens, min(len(contexts), 1), result.target_s, prompts)
        if self._draft is None or not any(proposed):
            return
        by_model = [k if row.drafted_by_model else 0 for k, row in zip(proposed, result.view.rows, strict=True)]
        read = sum([context * k for context, k in zip(contexts, by_model, strict=True)])
        tokens, passes = catch_up_cost(_unread(result.view.rows, by_model))
        self._draft.observe(read, sum(by_model) + tokens, max(by_model) + passes, result.draft_s)

    def _compare_with_prediction(self, result: StepResult, rows: Sequence[RowResult], prompts_s: float) -> None:
        """Record the error of the prediction, and decide whether speculation continues.

        Args:
            result: the step.
            rows: its decoding rows.
            prompts_s: predicted seconds of reading prompts. Subtracted from both times, for they are paid either way.
        """
        plan, why = result.plan, result.plan.why
        speculated = any(row.proposed for row in rows)
        trial = speculated and isinstance(why, Decision) and why.mode == "trial"
        self._speculation.step_passed(speculated, self._catch_up_s(result.view.rows, why.lengths) if trial else None)
        if self._to_learn:
            self._to_learn = self._to_learn[1:]
            return
        if plan.predicted_s is None or plan.predicted_tokens is None:
            return
        # A step that is shorter than its prompts were believed to be: 0 counts, a negative time would be left out.
        measured_s, predicted_s = max(0.0, result.total_s - prompts_s), plan.predicted_s - prompts_s
        if not speculated:
            self._speculation.saw_plain(measured_s, predicted_s)
            return
        self._speculation.saw_speculation(
            sum(row.emitted for row in rows), plan.predicted_tokens, measured_s, predicted_s
        )
        if self._speculation.can_judge:
            nothing, best = why.raw if isinstance(why, Decision) else self.decide(result.view).raw
            self._speculation.judge(nothing, best)

    def _prompts_s(self, result: StepResult) -> float:
        """Return the seconds that reading the step's prompts was predicted to take."""
        if not result.prefill_tokens:
            return 0.0
        contexts, lengths = [0] * len(result.plan.rows), [row.length for row in result.plan.rows]
        with_prompts = self.latency.target_s(contexts, lengths, result.prefill_tokens)
        return with_prompts - (self.latency.target_s(contexts, lengths) if lengths else 0.0)


def _unread(rows: Sequence[RowView], lengths: Sequence[int]) -> list[int]:
    """Return the unread tokens of the rows that the draft model drafts for."""
    return [row.unread_tokens for row, k in zip(rows, lengths, strict=True) if k and row.drafted_by_model]
