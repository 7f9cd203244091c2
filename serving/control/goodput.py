"""Lengths that maximise goodput, tokens a second (SmartSpec, Liu et al. 2024), and are seldom slower than none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy

from distillspec.config.engine import LENGTHS
from distillspec.errors import ConfigError
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, RowPlan, StepResult, decoding_rows
from distillspec.serving.base.rows import BEHIND, BatchView, RowView, evidence
from distillspec.serving.base.shape import TreeShape, chain_shape
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.bounded import WITHIN, bounds_of
from distillspec.serving.control.candidates import Candidates
from distillspec.serving.control.decision import (
    Decision,
    Known,
    Mode,
    catch_up_s,
    drafting_s,
    work_of,
)
from distillspec.serving.control.held_plan import HeldPlan
from distillspec.serving.control.priced_steps import PricedSteps, trials_of_drafts, without_likely
from distillspec.serving.control.reading import best_worth_reading, readable
from distillspec.serving.control.sources import choose_sources
from distillspec.serving.control.speculation_policy import SpeculationPolicy
from distillspec.serving.control.step_batch import StepBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.live_latency import LiveLatency

TRY_LENGTH = 2  # tokens a row drafts on trial
FORGET_ROWS_EVERY = 256  # steps
# Costs of passes larger than those that are run are never corrected. So the first plan after so many speculating steps
# drafts a token more a row, if it is expected to reach this share of the goodput.
EXPLORE_EVERY, EXPLORE_WITHIN = 20, 0.85
HOPE = 1.0  # standard errors of acceptance: see `_hoped`


class GoodputController:
    """Plans the lengths of highest expected goodput, and learns acceptance and costs from every step.

    Args:
        speculation_length: the most tokens a row may draft.
        latency: measured costs. None: guessed, and learnt from the first steps.
        lengths: `request` gives each row its own, `step` one for all, `global` one acceptance as well.
        drafts_with_model: False where proposals cost next to nothing (prompt lookup).
        trees: the nodes that trees may have. None: chains, as where all rows have one length, and within bounds.
        acceptance: the estimate of acceptance, None for the default.
        max_time_per_token_s: bound on every row's expected time per output token, unless the row has its own. If no
            lengths keep it, those with the worst row nearest to it are chosen.
    """

    def __init__(
        self,
        speculation_length: int,
        latency: LatencyModel | None = None,
        *,
        lengths: str = "request",
        drafts_with_model: bool = True,
        trees: Candidates | None = None,
        acceptance: AcceptanceEstimate | None = None,
        max_time_per_token_s: float | None = None,
    ) -> None:
        if lengths not in LENGTHS:
            raise ConfigError(f"lengths={lengths} must be one of {', '.join(LENGTHS)}")
        if max_time_per_token_s is not None and not max_time_per_token_s > 0:
            raise ConfigError(f"max_time_per_token_s={max_time_per_token_s} must be above 0 seconds")
        self.speculation_length, self.max_time_per_token_s = speculation_length, max_time_per_token_s
        self._alike = lengths != "request"
        self._costs = LiveLatency(latency, drafts_with_model=drafts_with_model)
        self._waiting: list[StepResult] = []  # not learnt from yet
        shared = {"strength": float("inf")} if lengths == "global" else {}
        self.trees = None if self._alike else trees
        width = 1 if self.trees is None else 1 + int(self.trees.ranks.max(initial=0))
        own = AcceptanceEstimate(speculation_length, width, **shared)
        self._acceptance = own if acceptance is None else acceptance
        self._steps, self._forgot_at, self._price = 0, 0, 0.0
        self._held, self._priced = HeldPlan(), PricedSteps(speculation_length, self.trees)
        self._speculation = SpeculationPolicy()

    @property
    def latency(self) -> LatencyModel:
        """The estimate of the costs of steps. Those of the plan that holds may not be in it yet."""
        return self._costs.latency

    @property
    def acceptance(self) -> AcceptanceEstimate:
        """The present estimate of acceptance."""
        self._learn()
        return self._acceptance

    @property
    def speculation(self) -> SpeculationPolicy:
        """The policy that measures the gain of speculation, and stops it where there is none."""
        self._learn()
        return self._speculation

    def use_costs(self, latency: LatencyModel) -> None:
        """Go on from newly measured costs."""
        self._learn()
        self._held.drop()
        self._priced.drop()
        self._costs = LiveLatency(latency, drafts_with_model=self._costs.drafts_with_model)

    def plan(self, view: BatchView) -> Plan:
        view = self._priced.awake(view)
        if (held := self._held_for(view)) is not None:
            return held
        decision = self._priced.decide_again(view, self._known) or self.decide(view)
        rows = map(RowPlan.of, decision.rows, decision.shapes)
        return Plan(tuple(rows), decision.predicted_tokens, decision.predicted_s, decision)

    def decide(self, view: BatchView) -> Decision:
        """Plan lengths, with reasons, by all steps so far. The same view gives the same decision.

        The time of prompts read in the same step is paid whatever is drafted. Counted in, it would make each drafted
        token look cheap (the ratio is low anyway), so lengths are chosen without it. Bounds hold for the whole step.
        """
        self._learn()
        bounds = bounds_of(view.rows, self.max_time_per_token_s)
        if bounds is None and not self._alike and self._priced.applies(view.rows):
            return self._priced.decide(view, self._known)
        view = replace(view, rows=choose_sources(without_likely(view.rows), self.acceptance, self.latency))
        batch = self._batch(view, trees := self.trees if bounds is None else None)
        best = self._best(view, trees, batch)
        mode, planned = self._pick(view, batch, best)
        prompts_s = self.latency.prompts_s(len(view.rows), view.prefill_tokens)
        wished, excess = planned, None
        if bounds is not None:
            planned, excess = batch.within(bounds, wished, best.goodput, prompts_s, alike=self._alike)
        if excess is not None and planned is not wished:
            mode = "within bounds" if excess <= WITHIN else "bounds out of reach"
        rates = batch.plain.goodput, best.goodput
        return self._known.decision(mode, view, self._shapes(planned), planned, rates, excess=excess)

    def _held_for(self, view: BatchView) -> Plan | None:
        """Return the last step's plan if it is good for this one too."""
        why, policy = self._held.decision(self._steps), self._speculation
        if why is None or view.prefill_tokens or self.max_time_per_token_s is not None:
            return None
        speculating, waiting = why.mode == "speculating", why.mode == "not worth it"
        waits = waiting and not policy.trial_is_due and not (self._priced.used and policy.speculates)
        good = policy.speculates and not policy.plain_is_due if speculating else waits
        return self._held.plan if good and why.holds_for(view.rows, self.speculation_length) else None

    def observe(self, result: StepResult) -> None:
        """Keep a step. The next planning learns from it.

        Steps of one plan are learnt from together: after a pass the processor's caches hold none of this code.
        """
        self._held.observe(result, self._steps)
        self._steps += 1
        self._priced.step(len(result.view.rows))
        self._count(result)
        self._waiting.append(result)
        if self._held.decision(self._steps) is None:
            self._learn()

    def draft_changed(self, acceptance: float | None = None) -> None:
        """Forget the old draft's measured gain, and its acceptance where the new one's is not known."""
        self.acceptance.reset() if acceptance is None else self.acceptance.scale(acceptance)
        self._speculation = SpeculationPolicy()
        self._held.drop()
        self._priced.drop()

    def member_changed(self, change: DraftChange) -> None:
        """Forget what one of several drafts accepted and cost, as far as the new one's is not known."""
        for kind in (change.source, (change.source, BEHIND)):
            self.acceptance.change(kind, change.acceptance)
        self._costs.draft_changed(change)
        self._speculation = SpeculationPolicy()
        self._held.drop()
        self._priced.drop()

    @property
    def most_nodes(self) -> int:
        """The most tokens of a row's tree."""
        return self.speculation_length if self.trees is None else len(self.trees)

    @property
    def _known(self) -> Known:
        return Known(self._acceptance, self._costs.latency, self._speculation, self._price, self._steps)

    def _learn(self) -> None:
        """Learn from the steps that wait: acceptance, costs, and errors of the predictions."""
        waiting, self._waiting = self._waiting, []
        for result in waiting:
            self._learn_from(result)
        if waiting and self._steps >= self._forgot_at + FORGET_ROWS_EVERY:
            self._forgot_at = self._steps
            self._acceptance.keep_only([row.sequence_id for row in waiting[-1].view.rows])

    def _learn_from(self, result: StepResult) -> None:
        rows, view, why = decoding_rows(result), result.view, result.plan.why
        if isinstance(why, Decision) and (self._priced.used or any(row.others for row in view.rows)):
            view = replace(view, rows=why.rows)
        prompts_s = self._costs.latency.prompts_s(len(view.rows), result.prefill_tokens)
        sure = len(rows) == len(view.rows) and self._costs.observe(
            work_of(view, result.plan, rows, trees=self.trees is not None),
            result.prefill_tokens,
            result.target_s,
            drafting_s(view, result),
        )
        kinds = {row.sequence_id: kind for row in view.rows if (kind := evidence(row))}
        tried = trials_of_drafts(view.rows, rows)
        self._acceptance.observe(tried, [kinds.get(row.sequence_id, 0) for row in tried] if kinds else None)
        if isinstance(why, Decision):
            self._price = why.raw[1]
            if rows and sure:
                self._judge(result, why, rows, prompts_s)

    def _batch(self, view: BatchView, trees: Candidates | None, hope: float = 0.0) -> StepBatch:
        own = view, self.speculation_length, self.acceptance, self.latency
        return StepBatch.of(*own, trees=trees, price=self._price, hope=hope)

    def _best(self, view: BatchView, trees: Candidates | None, batch: StepBatch, hope: float = 0.0) -> Allocation:
        """Return the best lengths of which no long text is read in vain."""

        def best_of(rows: tuple[RowView, ...]) -> Allocation:
            return self._batch(replace(view, rows=rows), trees, hope).best(alike=self._alike)

        return best_worth_reading(view.rows, batch.best(alike=self._alike), best_of, self.latency)

    def _shapes(self, planned: Allocation) -> tuple[TreeShape, ...]:
        if planned.taken is None or self.trees is None:
            return tuple(map(chain_shape, planned.lengths.tolist()))
        return tuple(map(self.trees.shape, planned.taken))

    def _pick(self, view: BatchView, batch: StepBatch, best: Allocation) -> tuple[Mode, Allocation]:
        if not batch.limits.any():
            return "nothing to draft for", batch.plain
        policy = self.speculation
        if policy.speculates and best.lengths.any():
            return ("measuring plain", batch.plain) if policy.plain_is_due else self._explored(view, batch, best)
        if policy.trial_is_due:
            tried = batch.expected(numpy.minimum(batch.limits, TRY_LENGTH))
            if policy.affords(tried, batch.plain, catch_up_s(self.latency, view.rows, tried.lengths.tolist())):
                return "trial", tried
        return self._hoped(view, batch) if policy.speculates else ("not worth it", batch.plain)

    def _hoped(self, view: BatchView, batch: StepBatch) -> tuple[Mode, Allocation]:
        """Return short chains that would pay if acceptance were what it may be: an unused draft teaches nothing."""
        best = self._best(view, None, self._batch(view, None, HOPE), HOPE)
        tried = batch.expected(numpy.minimum(best.lengths, TRY_LENGTH))
        return ("exploring", tried) if best.nodes else ("not worth it", batch.plain)

    def _explored(self, view: BatchView, batch: StepBatch, best: Allocation) -> tuple[Mode, Allocation]:
        """Return the best lengths, now and then those of one token more a row."""
        if self._held.unexplored >= EXPLORE_EVERY:
            wished = best.lengths + readable(view.rows, best.lengths.tolist())
            longer = batch.expected(numpy.minimum(wished, batch.limits))
            if longer.nodes > best.nodes and longer.goodput > EXPLORE_WITHIN * best.goodput:
                return "exploring", longer
        return "speculating", best

    def _count(self, result: StepResult) -> None:
        """Count a step that rows decoded in: trials and plain steps are due by these counts."""
        if not (rows := decoding_rows(result)):
            return
        why, speculated = result.plan.why, any(row.nodes for row in rows)
        trial = speculated and isinstance(why, Decision) and why.mode == "trial"
        self._speculation.step_passed(speculated, catch_up_s(self.latency, why.rows, why.lengths) if trial else None)

    def _judge(self, result: StepResult, why: Decision, rows: Sequence[RowResult], prompts_s: float) -> None:
        """Record the error of the prediction, and decide whether speculation continues."""
        policy, speculated = self._speculation, any(row.nodes for row in rows)
        tokens = (sum([row.emitted for row in rows]), why.predicted_tokens) if speculated else None
        measured_s = self._priced.learn(result, why, tokens)
        policy.saw(measured_s, why.predicted_s - prompts_s, prompts_s, tokens)
        if speculated:
            policy.judge(*why.raw)
