"""Choice of a step's plan: the best one, or another one that teaches something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.rows import RowView, names_nodes
from distillspec.serving.control.decision import Mode
from distillspec.serving.control.offers import StepPlan
from distillspec.serving.control.price_list import PriceList
from distillspec.serving.control.speculation_policy import SpeculationPolicy
from distillspec.serving.costs.step_work import catch_up_s

TRY_LENGTH = 2  # tokens a row drafts on trial
# Costs of passes larger than those that are run are never corrected. So the first plan after so many speculating steps
# drafts a token more a row, if it is expected to reach this share of the goodput.
EXPLORE_EVERY, EXPLORE_WITHIN = 20, 0.85
HOPE = 1.0  # standard errors of acceptance: see `Choice._hoped`


@dataclass(frozen=True)
class Choice:
    """Chooses among plans of one step.

    Args:
        rows: of the step.
        prices: for its plans.
        policy: whether speculation goes on, and when it is measured again.
        unexplored: speculating steps since the last one that explored.
    """

    rows: Sequence[RowView]
    prices: PriceList
    policy: SpeculationPolicy
    unexplored: int

    def of(self, best: StepPlan, plain: StepPlan) -> tuple[Mode, StepPlan]:
        """Return the plan to take. `plain`: the one without drafted tokens."""
        if not any(row.limit or row.others for row in self.rows):
            return "nothing to draft for", plain
        policy, named = self.policy, any(map(names_nodes, self.rows))
        pays = best.nodes > 0 and best.goodput > plain.goodput
        if policy.speculates and pays:
            return ("measuring plain", plain) if policy.plain_is_due else self._explored(best)
        if named and not pays:
            return "not worth it", plain
        if policy.trial_is_due:
            tried = best if named else self.prices.chains(self.rows, [TRY_LENGTH] * len(self.rows))
            reading_s = catch_up_s(self.prices.latency, [each.row for each in tried.chosen], tried.depths)
            if tried.nodes and policy.affords(tried.expected, plain.expected, reading_s):
                return "trial", tried
        return self._hoped(plain) if policy.speculates else ("not worth it", plain)

    def _hoped(self, plain: StepPlan) -> tuple[Mode, StepPlan]:
        """Return short chains that would pay if acceptance were what it may be: an unused draft teaches nothing."""
        best = self.prices.hopeful(HOPE).plan(self.rows)
        if not best.nodes:
            return "not worth it", plain
        lengths = [min(depth, TRY_LENGTH) for depth in best.depths]
        return "hoped", self.prices.chains([each.row for each in best.chosen], lengths)

    def _explored(self, best: StepPlan) -> tuple[Mode, StepPlan]:
        """Return the best plan, now and then chains of one token more a row."""
        if self.unexplored >= EXPLORE_EVERY and not any(map(names_nodes, self.rows)):
            rows = [each.row if each.shape.depth else row for each, row in zip(best.chosen, self.rows, strict=True)]
            longer = self.prices.chains(rows, list(map(_longer, rows, best.depths)))
            if longer.nodes > best.nodes and longer.goodput > EXPLORE_WITHIN * best.goodput:
                return "exploring", longer
        return "speculating", best


def _longer(row: RowView, depth: int) -> int:
    """Return a token more for a row that drafts, or could draft without a long text being read for it."""
    return depth + (depth > 0 or not row.drafted_by_model or row.unread_tokens <= ALONG)
