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
from distillspec.serving.base.rows import BEHIND, BatchView, evidence, names_nodes
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.bounded import WITHIN, best_within, bounds_of, chains_of
from distillspec.serving.control.candidates import Candidates
from distillspec.serving.control.choice import HOPE, Choice
from distillspec.serving.control.decision import Decision, Mode
from distillspec.serving.control.held_plan import HeldPlan
from distillspec.serving.control.named_sources import NamedSources, trials_of_drafts, without_named
from distillspec.serving.control.offers import StepPlan
from distillspec.serving.control.price_list import PriceList
from distillspec.serving.control.speculation_policy import SpeculationPolicy
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.live_latency import LiveLatency
from distillspec.serving.costs.step_work import catch_up_s, drafting_s, work_of
from distillspec.serving.costs.table import Floats

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

    def use_costs(self, latency: LatencyModel) -> None:
        """Go on from newly measured costs."""
        self._learn()
        self._forget_plans()
        self._costs = LiveLatency(latency, drafts_with_model=self._costs.drafts_with_model)

    def plan(self, view: BatchView) -> Plan:
        view = self._named.awake(view)
        if (held := self._held_for(view)) is not None:
            return held
        decision = self._decide_again(view) or self.decide(view)
        rows = map(RowPlan.of, decision.rows, decision.shapes)
        return Plan(tuple(rows), decision.predicted_tokens, decision.predicted_s, decision)

    def decide(self, view: BatchView) -> Decision:
        """Plan lengths, with reasons, by all steps so far. The same view gives the same decision.

        The time of prompts read in the same step is paid whatever is drafted. Counted in, it would make each drafted
        token look cheap (the ratio is low anyway), so lengths are chosen without it. Bounds hold for the whole step.
        """
        self._learn()
        bounds = bounds_of(view.rows, self.max_time_per_token_s)
        if bounds is not None or self._alike:
            return self._decide_chains(view, bounds)
        named = self._named.applies(view.rows)
        prices = self._prices(view, self.trees)
        if named and self._named.keep(prices, view, self._steps):
            # A draft that is not worth its cost is tried too, if it may be.
            other = prices.hopeful(HOPE).plan(view.rows, second=True)
            if other.goodput > prices.plain(view.rows).goodput:
                return self._decided(view, prices, other, named=True, second=True)
        return self._decided(view, prices, prices.plan(view.rows), named=named)

    def _decide_again(self, view: BatchView) -> Decision | None:
        """Decide by the last price list, where rows have sources that name their nodes."""
        policy, prices = self._speculation, self._named.kept(view, self._steps)
        if prices is None or not policy.speculates or policy.plain_is_due:
            return None
        return self._decided(view, prices, prices.plan(view.rows), named=True)

    def _decided(
        self, view: BatchView, prices: PriceList, best: StepPlan, *, named: bool, second: bool = False
    ) -> Decision:
        """Return the decision between the best plan and others. `second`: it has rows' second best sources."""
        plain = prices.plain(view.rows)
        if named and not second:
            self._named.weigh(view.rows, best.gain)
        mode, planned = self._choice(view, prices).of(best, plain)
        promised = self._named.promise(best, plain, usual=not second) if named else best.goodput
        return self._reasons(mode, view, planned, best, (plain.goodput, promised))

    def _decide_chains(self, view: BatchView, bounds: Floats | None) -> Decision:
        """Plan chains of one source for each row: all of one length, or within bounds."""
        rows = [row.with_option(row.options[0]) for row in map(without_named, view.rows)]
        view = replace(view, rows=tuple(rows))
        prices = self._prices(view, None)
        batch = chains_of(rows, self.speculation_length, self.acceptance, self.latency, view.prefill_tokens)
        best, plain = prices.plan(rows), prices.plain(rows)
        if self._alike:
            every = batch.alike
            place = numpy.argmax([each.goodput for each in batch.expected(every)])
            best = prices.chains(rows, every[place].tolist())
        mode, planned = self._choice(view, prices).of(best, plain)
        excess = None
        if bounds is not None:
            prompts_s, lengths = self.latency.prompts_s(len(rows), view.prefill_tokens), numpy.array(planned.depths)
            kept, excess = best_within(batch, bounds, lengths, prompts_s, alike=self._alike)
            if kept is not lengths:
                mode = "within bounds" if excess <= WITHIN else "bounds out of reach"
                planned = prices.chains(rows, kept.tolist())
        return self._reasons(mode, view, planned, best, (plain.goodput, best.goodput), excess)

    def _held_for(self, view: BatchView) -> Plan | None:
        """Return the last step's plan if it is good for this one too."""
        why, policy = self._held.decision(self._steps), self._speculation
        if why is None or view.prefill_tokens or self.max_time_per_token_s is not None:
            return None
        speculating, waiting = why.mode in ("speculating", "hoped"), why.mode == "not worth it"
        named = self._named.used and policy.speculates and any(map(names_nodes, view.rows))
        waits = waiting and not policy.trial_is_due and not named
        good = policy.speculates and not policy.plain_is_due if speculating else waits
        return self._held.plan if good and why.holds_for(view.rows, self.speculation_length) else None

    def observe(self, result: StepResult) -> None:
        """Keep a step. The next planning learns from it.

        Steps of one plan are learnt from together: after a pass the processor's caches hold none of this code.
        """
        self._held.observe(result, self._steps)
        self._steps += 1
        self._named.step(len(result.view.rows))
        self._count(result)
        self._waiting.append(result)
        if self._held.decision(self._steps) is None:
            self._learn()

    def draft_changed(self, acceptance: float | None = None) -> None:
        """Forget the old draft's measured gain, and its acceptance where the new one's is not known."""
        self.acceptance.change_draft(acceptance)
        self._speculation = SpeculationPolicy()
        self._forget_plans()

    def member_changed(self, change: DraftChange) -> None:
        """Forget what one of several drafts accepted and cost, as far as the new one's is not known."""
        for kind in (change.source, (change.source, BEHIND)):
            self.acceptance.change(kind, change.acceptance)
        self._costs.draft_changed(change)
        self._speculation = SpeculationPolicy()
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._held.drop()
        self._named.drop()

    @property
    def most_nodes(self) -> int:
        """The most tokens of a row's tree."""
        return self.speculation_length if self.trees is None else len(self.trees)

    def _reasons(
        self,
        mode: Mode,
        view: BatchView,
        planned: StepPlan,
        best: StepPlan,
        rates: tuple[float, float],
        excess: float | None = None,
    ) -> Decision:
        """Return the decision for a plan.

        Args:
            rates: tokens a second without speculation, and those by which speculation is judged.
        """
        latency, policy = self._costs.latency, self._speculation
        rows, shapes = zip(*[(each.row, each.shape) for each in planned.chosen], strict=True) if view.rows else ((), ())
        lengths = tuple(planned.depths)
        further_s = latency.prompts_s(len(rows), view.prefill_tokens) + catch_up_s(latency, rows, lengths)
        return Decision(
            mode,
            lengths,
            shapes,
            rows,
            planned.expected.tokens,
            planned.expected.seconds + further_s,
            policy.plain_rate(rates[0]),
            best.goodput * policy.gain,
            policy.uncertainty,
            tuple(self._acceptance.hazards().tolist()),
            latency,
            rates,
            excess,
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

    def _prices(self, view: BatchView, trees: Candidates | None) -> PriceList:
        own = (view.rows, self.speculation_length, self.acceptance, self.latency)
        before, prefill_tokens = self._held.drafted(view.rows), view.prefill_tokens
        return PriceList(*own, trees=trees, price=self._price, prefill_tokens=prefill_tokens, before=before)

    def _choice(self, view: BatchView, prices: PriceList) -> Choice:
        return Choice(view.rows, prices, self.speculation, self._held.unexplored)

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
        measured_s = self._named.learn(result, why, tokens)
        policy.saw(measured_s, why.predicted_s - prompts_s, prompts_s, tokens)
        policy.judge(*why.raw)  # of plain steps too: other rows, or drafts, may be worth it
