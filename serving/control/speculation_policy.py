"""Speculation policy: stops speculation that measurably does not pay, and retries it at a small cost."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.catch_up import READ_WITH_DRAFTING
from distillspec.serving.base.rows import RowView, has_likely_nodes
from distillspec.serving.control.decision import STAY_PLAIN_ROWS_SHARE, Mode
from distillspec.serving.control.measured_gain import MeasuredGain
from distillspec.serving.costs.step_work import catch_up_s
from distillspec.serving.planning.offers import StepPlan
from distillspec.serving.planning.step_planner import StepPlanner

PLAIN_EVERY = 100  # speculating steps between two plain ones, which measure the cost of plain decoding
TRIALS_COST = 0.004  # share of all tokens that trials may lose where speculation does not pay
FIRST_TRIAL_COST = 2.0  # plain steps that the first trial of a draft may lose: nothing is known of it yet
TRY_EVERY = 10  # plain steps between two points where a trial may start
LOOK_AGAIN = 1.25  # times as many plain steps as before a look that started none: looks are plans of their own
TRY_LENGTH = 2  # tokens a row drafts in a trial
FEWEST_TRIED, MOST_TRIED = 4, 32  # steps of a trial. It continues until it has lost as much as its catch-up prefill
FEWEST_TO_JUDGE = 100  # speculating steps before speculation may be switched off
EXPLORE_WITHIN = 0.85  # share of the best plan's goodput that one which explores is expected to reach
OPTIMISM_SE = 1.0  # standard errors of acceptance: see `SpeculationPolicy._optimistic_chains`


class SpeculationPolicy:
    """Follows from the measured gain of a draft's speculation: takes the best plan, or one that teaches something."""

    def __init__(self) -> None:
        self.measured = MeasuredGain()
        self.speculates = True  # not switched off
        self._since_plain = self._since_speculation = 0  # steps
        self._was_tried = False
        self._next_look = 0.0  # plain steps before it
        self._last_look_rows = 0
        self._trial_steps = 0  # of the current trial
        self._trial_catch_up_s = 0.0

    @property
    def plain_is_due(self) -> bool:
        """True when plain decoding is due to be measured again."""
        return self._since_plain >= PLAIN_EVERY

    @property
    def trial_is_due(self) -> bool:
        """True during a trial, and when one may start."""
        if self._trial_steps:
            return True
        since = self._since_speculation
        return since % TRY_EVERY == 0 and since >= self._next_look and (since > 0 or not self._was_tried)

    def choose(
        self, rows: Sequence[RowView], planner: StepPlanner, best: StepPlan, plain: StepPlan, explores: bool
    ) -> tuple[Mode, StepPlan]:
        """Return the plan to take, and what it is taken for.

        Args:
            best, plain: the plan that is expected to give most, and the one without drafted tokens.
            explores: a plan that speculates should draft more than the best one, if that costs little.
        """
        likely = any(map(has_likely_nodes, rows))
        if not any(row.limit or row.others for row in rows):
            return "nothing to draft for", plain
        pays = best.nodes > 0 and best.goodput > plain.goodput
        if self.speculates and pays:
            if self.plain_is_due:
                return "measuring plain", plain
            longer = _longer(rows, planner, best) if explores and not likely else None
            return ("speculating", best) if longer is None else ("exploring", longer)
        if likely and not pays:
            return "not worth it", plain
        if self.trial_is_due:
            tried = best if likely else planner.chains(rows, [TRY_LENGTH] * len(rows))
            if tried.nodes and self._affords(tried, plain, planner):
                return "trial", tried
        optimistic = self._optimistic_chains(rows, planner) if self.speculates else plain
        return ("hoped", optimistic) if optimistic.nodes else ("not worth it", plain)

    def _optimistic_chains(self, rows: Sequence[RowView], planner: StepPlanner) -> StepPlan:
        """Return short chains that would pay if acceptance were what it may be: an unused draft teaches nothing."""
        best = planner.with_optimism(rows, OPTIMISM_SE).plan(rows)
        return planner.chains([each.row for each in best.chosen], [min(depth, TRY_LENGTH) for depth in best.depths])

    def _affords(self, tried: StepPlan, plain: StepPlan, planner: StepPlanner) -> bool:
        """Return True if a trial starts or takes another step.

        It starts if its expected loss, catch-up prefill included, is a small share of the time since the last one; the
        first one if it is a few steps. It may then lose as much as its catch-up prefill took.
        """
        slower, plain_slower = self.measured.slower
        # In a step, against plain steps for as many tokens.
        lost_s = tried.expected.seconds * slower - tried.expected.tokens / self.measured.plain_rate(plain.goodput)
        if steps := self._trial_steps:
            return steps < FEWEST_TRIED or (steps < MOST_TRIED and steps * lost_s <= self._trial_catch_up_s)
        reading_s = catch_up_s(planner.latency, [each.row for each in tried.chosen], tried.depths)
        may_cost = TRIALS_COST * self._since_speculation if self._was_tried else FIRST_TRIAL_COST  # plain steps
        return reading_s + max(FEWEST_TRIED * lost_s, reading_s) <= may_cost * plain.expected.seconds * plain_slower

    def step_passed(self, rows: int, speculated: bool, trial_catch_up_s: float | None) -> None:
        """Count a step, measured or not.

        Args:
            rows: that decoded.
            speculated: True if it drafted tokens.
            trial_catch_up_s: seconds of catch-up prefill in a step of a trial, None for other steps.
        """
        self.measured.steps += 1
        if speculated or rows < STAY_PLAIN_ROWS_SHARE * self._last_look_rows:  # of fewer rows a trial costs less
            self._next_look = 0.0
            self._last_look_rows = 0
        elif self.trial_is_due:
            self._next_look = LOOK_AGAIN * self._since_speculation
            self._last_look_rows = rows
        self._was_tried |= speculated
        self._since_plain = self._since_plain + 1 if speculated else 0
        self._since_speculation = 0 if speculated else self._since_speculation + 1
        if trial_catch_up_s is not None and not self._trial_steps:
            self._trial_catch_up_s = trial_catch_up_s
        self._trial_steps = self._trial_steps + (trial_catch_up_s is not None) if speculated else 0

    def judge(self, plain_goodput: float, best_goodput: float) -> None:
        """Continue speculation if its measured goodput exceeds that of plain decoding by its own uncertainty.

        Nothing is decided before enough speculating steps were measured.

        Args:
            plain_goodput: predicted without speculation.
            best_goodput: predicted of the best lengths.
        """
        measured = self.measured
        if measured.seen >= FEWEST_TO_JUDGE:
            surely = best_goodput * measured.gain * (1 - measured.uncertainty)
            self.speculates = surely > measured.plain_rate(plain_goodput)


def _longer(rows: Sequence[RowView], planner: StepPlanner, best: StepPlan) -> StepPlan | None:
    """Return chains of one token more a row, as far as no long text is read for it, None where they cost too much."""
    drafting = [each.row if each.shape.depth else row for each, row in zip(best.chosen, rows, strict=True)]
    pairs = zip(drafting, best.depths, strict=True)
    lengths = [k + (k > 0 or not row.drafted_by_model or row.unread_tokens <= READ_WITH_DRAFTING) for row, k in pairs]
    longer = planner.chains(drafting, lengths)
    return longer if longer.nodes > best.nodes and longer.goodput > EXPLORE_WITHIN * best.goodput else None
