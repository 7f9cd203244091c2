"""Lengths that maximise goodput, tokens a second (SmartSpec, Liu et al. 2024), and are seldom slower than none."""

from __future__ import annotations

from dataclasses import replace

import numpy

from distillspec.config.engine import LENGTHS
from distillspec.errors import ConfigError
from distillspec.serving.base.candidates import Candidates
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, RowPlan, StepResult, decoding_rows
from distillspec.serving.base.rows import BatchView, names_nodes, without_named
from distillspec.serving.control.decision import Decision, matches_of
from distillspec.serving.control.held_plan import HeldPlan
from distillspec.serving.control.named_sources import NamedSources
from distillspec.serving.control.speculation_policy import HOPE, SpeculationPolicy
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.live_latency import LiveLatency
from distillspec.serving.costs.step_work import catch_up_s, drafting_s, work_of
from distillspec.serving.planning.bounded import WITHIN, best_within, bounds_of
from distillspec.serving.planning.offers import StepPlan
from distillspec.serving.planning.price_list import PriceList
from distillspec.types import Floats

FORGET_ROWS_EVERY = 256  # steps


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
        self._held, self._named = HeldPlan(), NamedSources()
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

    @property
    def most_nodes(self) -> int:
        """The most tokens of a row's tree."""
        return self.speculation_length if self.trees is None else len(self.trees)

    def plan(self, view: BatchView) -> Plan:
        view = self._named.awake(view)
        if (held := self._held_for(view)) is not None:
            return held
        return _plan_of(self._decide_again(view) or self.decide(view))

    def _held_for(self, view: BatchView) -> Plan | None:
        """Return the last step's plan if it is good for this one too."""
        why, policy = self._held.decision(self._steps), self._speculation
        if why is None or self.max_time_per_token_s is not None:
            return None
        same = not (view.prefill_tokens or why.prefill_tokens) and why.holds_for(view.rows, self.speculation_length)
        if why.mode in ("speculating", "hoped"):
            return self._held.plan if same and policy.speculates and not policy.plain_is_due else None
        named = self._named.used and policy.speculates and any(map(names_nodes, view.rows))
        if why.mode != "not worth it" or policy.trial_is_due or named:
            return None
        if same:
            return self._held.plan
        return _plan_of(why.plain_for(view)) if why.stays_plain(view) else None

    def _decide_again(self, view: BatchView) -> Decision | None:
        """Decide by the last price list, where rows have sources that name their nodes."""
        policy, prices = self._speculation, self._held.prices(view, self._steps)
        if prices is None or not policy.speculates or policy.plain_is_due:
            return None
        return self._decided(view, prices, prices.plan(view.rows), named=True)

    def decide(self, view: BatchView) -> Decision:
        """Plan lengths, with reasons, by all steps so far. The same view gives the same decision.

        The time of prompts read in the same step is paid whatever is drafted. Counted in, it would make each drafted
        token look cheap (the ratio is low anyway), so lengths are chosen without it. Bounds hold for the whole step.
        """
        self._learn()
        bounds = bounds_of(view.rows, self.max_time_per_token_s)
        if bounds is not None or self._alike:
            return self._decide_chains(view, bounds)
        prices, named = self._prices(view, self.trees), self._named.apply(view.rows)
        if named:
            self._held.keep(prices, view.rows, self._steps)
        if named and self._named.second_is_due(self._steps):
            # A draft that is not worth its cost is tried too, if it may be.
            other = prices.hopeful(HOPE).plan(view.rows, second=True)
            if other.goodput > prices.plain(view.rows).goodput:
                return self._decided(view, prices, other, named=True, second=True)
        return self._decided(view, prices, prices.plan(view.rows), named=named)

    def _decide_chains(self, view: BatchView, bounds: Floats | None) -> Decision:
        """Plan chains of one source for each row: all of one length, or within bounds."""
        rows = [row.with_option(row.options[0]) for row in map(without_named, view.rows)]
        view = replace(view, rows=tuple(rows))
        prices = self._prices(view, None)
        survival = self.acceptance.of_rows(rows)[:, : self.speculation_length, 0].cumprod(1)
        batch = ChainBatch.of_rows(rows, survival, self.latency, view.prefill_tokens)
        best = prices.plan(view.rows)
        if self._alike:
            every = batch.alike
            place = numpy.argmax([each.goodput for each in batch.expected(every)])
            best = prices.chains(view.rows, every[place].tolist())
        return self._decided(view, prices, best, bounded=None if bounds is None else (batch, bounds))

    def _prices(self, view: BatchView, trees: Candidates | None) -> PriceList:
        own = (view.rows, self.speculation_length, self.acceptance, self.latency)
        before, prefill_tokens = self._held.drafted(view.rows), view.prefill_tokens
        return PriceList(*own, trees=trees, price=self._price, prefill_tokens=prefill_tokens, before=before)

    def _decided(
        self,
        view: BatchView,
        prices: PriceList,
        best: StepPlan,
        *,
        named: bool = False,
        second: bool = False,
        bounded: tuple[ChainBatch, Floats] | None = None,
    ) -> Decision:
        """Return the decision between the best plan and others.

        Args:
            named: by what plans usually promise, as where sources name their nodes.
            second: the plan has rows' second best sources.
            bounded: chains of the rows, and their bounds.
        """
        plain, policy, latency = prices.plain(view.rows), self.speculation, self.latency
        mode, planned = policy.choose(view.rows, prices, best, plain, self._held.explores)
        excess: float | None = None
        further_s = latency.prompts_s(len(view.rows), view.prefill_tokens)
        if bounded is not None:
            lengths = numpy.array(planned.depths)
            kept, excess = best_within(*bounded, lengths, further_s, alike=self._alike)
            if kept is not lengths:
                mode = "within bounds" if excess <= WITHIN else "bounds out of reach"
                planned = prices.chains(view.rows, kept.tolist())
        rows = tuple([each.row for each in planned.chosen])
        usual = self._named.usual(best, plain, second=second) if named else None
        return Decision(
            mode=mode,
            lengths=tuple(planned.depths),
            shapes=tuple([each.shape for each in planned.chosen]),
            rows=rows,
            predicted_tokens=planned.expected.tokens,
            predicted_s=planned.expected.seconds + further_s + catch_up_s(latency, rows, planned.depths),
            plain_tokens_per_s=policy.plain_rate(plain.goodput),
            best_tokens_per_s=best.goodput * policy.gain,
            uncertainty=policy.uncertainty,
            hazards=tuple(self._acceptance.hazards().tolist()),
            latency=latency,
            raw=(plain.goodput, best.goodput if usual is None else plain.goodput * usual),
            slo_violation=excess,
            usual=usual,
            gain=best.gain if named and not second and any(map(names_nodes, view.rows)) else None,
            prefill_tokens=view.prefill_tokens,
            matches=matches_of(view.rows),
        )

    def observe(self, result: StepResult) -> None:
        """Keep a step. The next planning learns from it.

        Steps of one plan are learnt from together: after a pass the processor's caches hold none of this code.
        """
        if self._held.observe(result, self._steps):
            self._named.decided(result.plan.why, result.view.rows)
        self._steps += 1
        self._named.step(len(result.view.rows))
        self._count(result)
        self._waiting.append(result)
        if self._held.decision(self._steps) is None:
            self._learn()

    def _count(self, result: StepResult) -> None:
        """Count a step that rows decoded in: trials and plain steps are due by these counts."""
        if not (rows := decoding_rows(result)):
            return
        why, speculated = result.plan.why, any(row.nodes for row in rows)
        trial = speculated and isinstance(why, Decision) and why.mode == "trial"
        self._speculation.step_passed(
            len(rows), speculated, catch_up_s(self.latency, why.rows, why.lengths) if trial else None
        )

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
        if isinstance(why, Decision) and (self._named.used or any(row.others for row in view.rows)):
            view = replace(view, rows=why.rows)
        read = result.prefill_tokens
        prompts_s = self._costs.latency.prompts_s(len(view.rows), read) if read else 0.0  # a table is made for it
        sure = len(rows) == len(view.rows) and self._costs.observe(
            work_of(view, result.plan, rows, trees=self.trees is not None),
            read,
            result.target_s,
            drafting_s(view, result),
        )
        self._acceptance.learn(rows, view.rows)
        if not isinstance(why, Decision):
            return
        self._price = why.raw[1]
        if rows and sure:  # the error of the prediction says whether speculation continues
            speculated = any(row.nodes for row in rows)
            tokens = (sum([row.emitted for row in rows]), why.predicted_tokens) if speculated else None
            measured_s = self._named.learn(result, why, tokens)
            self._speculation.saw(measured_s, why.predicted_s - prompts_s, prompts_s, tokens)
            self._speculation.judge(*why.raw)  # of plain steps too: other rows, or drafts, may be worth it

    def use_costs(self, latency: LatencyModel) -> None:
        """Go on from newly measured costs."""
        self._learn()
        self._forget_plans()
        self._costs = LiveLatency(latency, drafts_with_model=self._costs.drafts_with_model)

    def draft_changed(self, acceptance: float | None = None) -> None:
        """Forget the old draft's measured gain, and its acceptance where the new one's is not known."""
        self.acceptance.change_draft(acceptance)
        self._speculation = SpeculationPolicy()
        self._forget_plans()

    def member_changed(self, change: DraftChange) -> None:
        """Forget what one of several drafts accepted and cost, as far as the new one's is not known."""
        self.acceptance.change(change.source, change.acceptance)
        self._costs.draft_changed(change)
        self._speculation = SpeculationPolicy()
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._held.drop()
        self._named.drop()


def _plan_of(decision: Decision) -> Plan:
    rows = map(RowPlan.of, decision.rows, decision.shapes)
    return Plan(tuple(rows), decision.predicted_tokens, decision.predicted_s, decision)
