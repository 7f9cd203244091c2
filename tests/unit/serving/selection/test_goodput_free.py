"""Selection by goodput among drafts and sources without a model, which stand beside the drafts and may draft alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.selection.base import Selection, members_of
from distillspec.serving.selection.baselines import Fixed, LookupElseModel
from distillspec.serving.selection.goodput import GoodputSelection

from .steps import COSTS, LENGTH, TARGET, parts

FREE = "lookup"
MATCHES = {"code": 0.95, "maths": 0.0, "mixed": 0.4}  # P(the text's end occurred before), by domain
RIGHT = 0.9  # P(a token of a match is accepted)
DRAFT = {"code": 0.05, "maths": 0.7, "mixed": 0.7}  # P(a token of the draft is accepted)


@dataclass
class Repeating:
    """Answers of which some repeat themselves. A match is drafted by the lookup, elsewhere the row's draft drafts."""

    selection: Selection
    random: Random = field(default_factory=lambda: Random(0))
    tokens: float = 0.0
    seconds: float = 0.0
    asked: int = 0
    chosen: list[tuple[str, str | None]] = field(default_factory=list)  # domain, member

    def serve(self, domain: str, tokens: int = 48) -> None:
        self.asked += 1
        written = 0
        while written < tokens:
            found = self.random.random() < MATCHES[domain]
            view = BatchView((self.row(written, domain, found),))
            members = self.selection.choose(view.rows)
            (member,) = members.values()
            self.chosen.append((domain, member))
            by = FREE if found else member if member != FREE else None
            written += self.step(view, dict(members), by, domain)

    def row(self, written: int, domain: str, found: bool) -> RowView:
        options = [Option(LENGTH, False, 3, source=FREE)] if found else []
        options += [Option(LENGTH, source="dear", unread_tokens=1)]
        own = (f"{self.asked}/0", 3 + written, *options[0])
        return RowView(*own, others=tuple(options[1:]), domain=domain, prompt=(1, 2, 3))

    def step(self, view: BatchView, members: dict[str, str | None], by: str | None, domain: str) -> int:
        """Run a step of one row, for which `by` drafts, None: nothing does."""
        name, chance, accepted = view.rows[0].sequence_id, RIGHT if by == FREE else DRAFT[domain], 0
        while by is not None and accepted < LENGTH and self.random.random() < chance:
            accepted += 1
        length = 0 if by is None else LENGTH
        drafted_s = COSTS.of_draft("dear").loop_s(1, 0, LENGTH) if by == "dear" else 0.0
        target_s = TARGET.seconds(0, 1 + length)
        result = RowResult.chain(name, length, accepted, accepted + 1, by or "dear", domain)
        plan = Plan((RowPlan.chain(view.rows[0], length),), chosen=members)
        total_s = drafted_s + target_s
        self.tokens, self.seconds = self.tokens + accepted + 1, self.seconds + total_s
        seen = StepResult((result,), view, plan, 0, drafted_s, target_s, total_s, 0, {by or "dear": drafted_s})
        self.selection.observe(seen, members)
        return accepted + 1

    def share(self, domain: str, member: str, last: int) -> float:
        own = [found for kind, found in self.chosen if kind == domain][-last:]
        return own.count(member) / len(own)


def goodput() -> GoodputSelection:
    return GoodputSelection(parts(("dear",), free=(FREE,)))


def test_a_row_whose_draft_is_not_worth_its_passes_gets_the_lookup_alone() -> None:
    world = Repeating(goodput())
    for _ in range(60):
        world.serve("code")
        world.serve("maths")
    assert world.share("code", FREE, 300) > 0.85
    assert world.share("maths", "dear", 300) > 0.95


@pytest.mark.parametrize("domain", ["mixed", "maths"])
def test_it_reaches_the_lookup_where_it_matches_and_else_the_draft(domain: str) -> None:
    """The baseline `lookup_else_model`, in tokens a second over the same answers."""
    ours, rule = Repeating(goodput()), Repeating(LookupElseModel(parts(("dear",))))
    for _ in range(150):
        ours.serve(domain)
        rule.serve(domain)
    assert ours.tokens / ours.seconds > 0.97 * rule.tokens / rule.seconds


def test_it_is_better_than_that_rule_where_the_draft_brings_nothing() -> None:
    ours, rule = Repeating(goodput()), Repeating(LookupElseModel(parts(("dear",))))
    alone = Repeating(Fixed(parts(("dear",), free=(FREE,)), draft=FREE))
    for _ in range(150):
        for world in (ours, rule, alone):
            world.serve("code")
    rates = [world.tokens / world.seconds for world in (ours, rule, alone)]
    assert rates[0] > rates[1]
    assert rates[0] > 0.97 * rates[2]


def test_no_belief_about_a_draft_is_told_of_a_row_without_one() -> None:
    selection = goodput()
    world = Repeating(selection)
    for _ in range(60):
        world.serve("code")
    assert world.chosen[-1] == ("code", FREE)
    row = world.row(48, "code", False)
    assert selection.choose([row]) == {row.sequence_id: FREE}
    assert selection.beliefs == {}
    assert members_of(row, (FREE,)) == ["dear", FREE]
