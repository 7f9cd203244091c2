"""Lengths that maximise goodput, tokens a second (SmartSpec, Liu et al. 2024), and are seldom slower than none."""

from __future__ import annotations

from dataclasses import replace

import numpy

from distillspec.config.engine import LENGTHS
from distillspec.errors import ConfigError
from distillspec.serving.base.candidates import Candidates
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, StepResult, decoding_rows
from distillspec.serving.base.rows import BatchView, for_chains, has_likely_nodes
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.decision import Decision, matches_of
from distillspec.serving.control.likely_sources import LikelySources
from distillspec.serving.control.reused_plan import ReusedPlan
from distillspec.serving.control.speculation_policy import OPTIMISM_SE, SpeculationPolicy
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.live_latency import LiveLatency
from distillspec.serving.costs.step_work import catch_up_s, drafting_s, work_of
from distillspec.serving.planning.bounded import KEPT_EXCESS, best_within, bounds_of
from distillspec.serving.planning.offers import StepPlan
from distillspec.serving.planning.step_planner import StepPlanner
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
        self.speculation_length = speculation_length
        self.max_time_per_token_s = max_time_per_token_s
        self._one_length = lengths != "request"  # for all rows of a step
        self._costs = LiveLatency(latency, drafts_with_model=drafts_with_model)
        self._waiting: list[StepResult] = []  # not learnt from yet
        self.trees = None if self._one_length else trees
        if acceptance is None:
            width = 1 if self.trees is None else 1 + int(self.trees.ranks.max(initial=0))
            one_for_all = {"strength": float("inf")} if lengths == "global" else {}
            acceptance = AcceptanceEstimate(speculation_length, width, **one_for_all)
        self._acceptance = acceptance
        self._steps = 0
        self._forgot_at = 0  # the step
        self._price = 0.0
        self._reused = ReusedPlan()
        self._likely_sources = LikelySources()
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
        view = self._likely_sources.awake(view)
        if (reused := self._reused_for(view)) is not None:
            return reused
        return (self._decide_again(view) or self.decide(view)).as_plan()

    def _reused_for(self, view: BatchView) -> Plan | None:
        """Return the last step's plan if it is good for this one too."""
        why, policy = self._reused.decision(self._steps), self._speculation
        if why is None:
            return None
        same = not (view.prefill_tokens or why.prefill_tokens) and why.holds_for(view.rows, self.speculation_length)
        if why.may_be_reused:
            as_usual = policy.speculates and not policy.plain_is_due  # a bound may demand tokens all the same
            return self._reused.plan if same and (why.is_bounded or as_usual) else None
        likely = self._likely_sources.used and policy.speculates and any(map(has_likely_nodes, view.rows))
        if not why.is_plain or policy.trial_is_due or likely:
            return None
        if same:
            return self._reused.plan
        return why.plain_for(view).as_plan() if why.stays_plain(view) else None

    def _decide_again(self, view: BatchView) -> Decision | None:
        """Decide by the last planner, where rows have sources with likely nodes."""
        policy, planner = self._speculation, self._reused.planner(view, self._steps)
        if planner is None or not policy.speculates or policy.plain_is_due:
            return None
        return self._decided(view, planner, planner.plan(view.rows), likely=True)

    def decide(self, view: BatchView) -> Decision:
        """Plan lengths, with reasons, by all steps so far. The same view gives the same decision.

        The time of prompts read in the same step is paid whatever is drafted. Counted in, it would make each drafted
        token look cheap (the ratio is low anyway), so lengths are chosen without it. Bounds hold for the whole step.
        """
        self._learn()
        bounds = bounds_of(view.rows, self.max_time_per_token_s)
        if bounds is not None or self._one_length:
            return self._decide_chains(view, bounds)
        planner, likely = self._planner(view, self.trees), self._likely_sources.apply(view.rows)
        if likely:
            self._reused.keep(planner, view.rows, self._steps)
        if likely and self._likely_sources.second_is_due(self._steps):
            # A draft that is not worth its cost is tried too, if it may be.
            other = planner.with_optimism(view.rows, OPTIMISM_SE).plan(view.rows, second=True)
            if other.goodput > planner.plain(view.rows).goodput:
                return self._decided(view, planner, other, likely=True, second=True)
        return self._decided(view, planner, planner.plan(view.rows), likely=likely)

    def _decide_chains(self, view: BatchView, bounds: Floats | None) -> Decision:
        """Plan chains of one source for each row: all of one length, or within bounds."""
        rows = [row.with_option(row.own) for row in map(for_chains, view.rows)]
        whole, view = view, replace(view, rows=tuple(rows))
        planner = self._planner(view, None)
        survival = self.acceptance.of_rows(rows)[:, : self.speculation_length, 0].cumprod(1)
        batch = ChainBatch.of_rows(rows, survival, self.latency, view.prefill_tokens)
        best = planner.plan(view.rows)
        if self._one_length:
            goodputs = [each.goodput for each in batch.expected(batch.alike)]
            best = planner.chains(view.rows, batch.alike[numpy.argmax(goodputs)].tolist())
        bounded = None if bounds is None else (batch, bounds)
        return replace(self._decided(view, planner, best, bounded=bounded), matches=matches_of(whole.rows))

    def _planner(self, view: BatchView, trees: Candidates | None) -> StepPlanner:
        known = (view.rows, self.speculation_length, self.acceptance, self.latency)
        before = self._reused.drafted(view.rows)
        planner = StepPlanner(*known, trees=trees, prefill_tokens=view.prefill_tokens, before=before)
        return planner.at_best_price(self._price)

    def _decided(
        self,
        view: BatchView,
        planner: StepPlanner,
        best: StepPlan,
        *,
        likely: bool = False,
        second: bool = False,
        bounded: tuple[ChainBatch, Floats] | None = None,
    ) -> Decision:
        """Return the decision between the best plan and others.

        Args:
            likely: by what plans usually promise, as where sources have likely nodes.
            second: the plan has rows' second best sources.
            bounded: chains of the rows, and their bounds.
        """
        plain, policy, latency = planner.plain(view.rows), self.speculation, self.latency
        mode, planned = policy.choose(view.rows, planner, best, plain, self._reused.explores)
        excess: float | None = None
        further_s = latency.prompts_s(len(view.rows), view.prefill_tokens)
        if bounded is not None:
            lengths = numpy.array(planned.depths)
            kept, excess = best_within(*bounded, lengths, further_s, alike=self._one_length)
            if kept is not lengths:
                mode = "within bounds" if excess <= KEPT_EXCESS else "bounds out of reach"
                planned = planner.chains(view.rows, kept.tolist())
        rows = tuple([each.row for each in planned.chosen])
        promised = self._likely_sources.promised_ratio(best, plain, second=second) if likely else None
        return Decision(
            mode=mode,
            lengths=tuple(planned.depths),
            shapes=tuple([each.shape for each in planned.chosen]),
            rows=rows,
            predicted_tokens=planned.expected.tokens,
            predicted_s=planned.expected.seconds + further_s + catch_up_s(latency, rows, planned.depths),
            plain_tokens_per_s=policy.measured.plain_rate(plain.goodput),
            best_tokens_per_s=best.goodput * policy.measured.gain,
            uncertainty=policy.measured.uncertainty,
            hazards=tuple(self._acceptance.hazards().tolist()),
            latency=latency,
            predicted_plain_goodput=plain.goodput,
            predicted_best_goodput=best.goodput if promised is None else plain.goodput * promised,
            slo_violation=excess,
            promised_ratio=promised,
            gain=best.gain if likely and not second and any(map(has_likely_nodes, view.rows)) else None,
            prefill_tokens=view.prefill_tokens,
            matches=matches_of(view.rows),
        )

    def observe(self, result: StepResult) -> None:
        """Keep a step. The next planning learns from it.

        Steps of one plan are learnt from together: after a pass the processor's caches hold none of this code.
        """
        if self._reused.observe(result, self._steps):
            self._likely_sources.decided(result.plan.why, result.view.rows)
        self._steps += 1
        self._likely_sources.step(len(result.view.rows))
        self._count(result)
        self._waiting.append(result)
        if self._reused.decision(self._steps) is None:
            self._learn()

    def _count(self, result: StepResult) -> None:
        """Count a step that rows decoded in: trials and plain steps are due by these counts."""
        if not (rows := decoding_rows(result)):
            return
        why, speculated = result.plan.why, any(row.nodes for row in rows)
        trial = speculated and isinstance(why, Decision) and why.is_trial
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
        if isinstance(why, Decision) and (self._likely_sources.used or any(r.others or r.likely for r in view.rows)):
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
        self._price = why.predicted_best_goodput
        if rows and sure:  # the error of the prediction says whether speculation continues
            speculated = any(row.nodes for row in rows)
            tokens = (sum([row.emitted for row in rows]), why.predicted_tokens) if speculated else None
            measured_s = self._likely_sources.learn(result, why, tokens)
            self._speculation.measured.saw(measured_s, why.predicted_s - prompts_s, prompts_s, tokens)
            # Plain steps are judged too: other rows, or drafts, may be worth speculation.
            self._speculation.judge(why.predicted_plain_goodput, why.predicted_best_goodput)

    def use_costs(self, latency: LatencyModel) -> None:
        """Go on from newly measured costs."""
        self._learn()
        self._forget_plans()
        self._costs = LiveLatency(latency, drafts_with_model=self._costs.drafts_with_model)

    def draft_changed(self, change: DraftChange) -> None:
        """Forget the old draft's measured gain, and its acceptance and costs as far as the new one's are not known.

        The costs of an only draft stay where nothing is known of the new one's.
        """
        if change.source == DRAFT:
            self.acceptance.change_draft(change.acceptance)
        else:
            self.acceptance.change(change.source, change.acceptance)
        if change.source != DRAFT or change.like is not None:
            self._costs.draft_changed(change)
        self._speculation = SpeculationPolicy()
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._reused.drop()
        self._likely_sources.drop()
