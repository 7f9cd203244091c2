"""A plan holds for a few steps while the rows are the same, and for none where anything about them changes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.candidates import candidates
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.base.shape import chain_shape
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.decision import Decision
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.reused_plan import EXPLORE_EVERY, HOLD_STEPS, MOST_HOLD_STEPS, ReusedPlan
from distillspec.serving.costs.live_latency import LiveLatency, RowWork
from distillspec.serving.costs.table import CostTable

from ..machine import CPU


class Counted(GoodputController):
    decided = 0

    def decide(self, view: BatchView) -> Decision:
        self.decided += 1
        return super().decide(view)


def view_of(count: int = 2, step: int = 0, **changed: Any) -> BatchView:
    """Rows whose texts grow, so that less is left of their answers."""
    rows = [RowView(f"r{i}", 100 + 2 * step, 300 - step, unread_tokens=1 + step % 2, wide=True) for i in range(count)]
    rows[-1] = rows[-1]._replace(**changed)
    return BatchView(tuple(rows))


def step(controller: GoodputController, view: BatchView, accepted: int = 4) -> Plan:
    plan = controller.plan(view)
    rows: Sequence[RowResult] = [
        RowResult.chain(row.sequence_id, k, min(k, accepted), min(k, accepted) + 1)
        for row in plan.rows
        for k in [row.speculation_length]
    ]
    assert plan.predicted_s is not None
    controller.observe(
        StepResult(tuple(rows), view, plan, view.prefill_tokens, 0.0, plan.predicted_s, plan.predicted_s)
    )
    return plan


def settled(steps: int = 40, accepted: int = 4) -> Counted:
    """A controller that has stepped until a plan is fresh, and alike the one before."""
    controller = Counted(4, CPU, trees=candidates((2, 2, 1, 1), 12))
    for number in range(steps):
        step(controller, view_of(step=number), accepted)
    while True:
        controller.decided = 0
        plan = step(controller, view_of(step=steps), accepted)
        assert isinstance(plan.why, Decision)
        if controller.decided and plan.why.mode != "exploring":
            controller.decided = 0
            return controller


def test_most_steps_take_the_plan_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, learnt = settled(10), []
    learn = LiveLatency.observe

    def recorded(costs: LiveLatency, rows: Sequence[RowWork], *rest: Any) -> bool:
        learnt.append([row.context_tokens for row in rows])
        return learn(costs, rows, *rest)

    assert len(controller.acceptance), "all steps before are learnt from"
    monkeypatch.setattr(LiveLatency, "observe", recorded)
    plans = [step(controller, view_of(step=number)) for number in range(2 * MOST_HOLD_STEPS)]
    assert 2 <= controller.decided <= 5, "with one that explores"
    assert all(row.speculation_length for plan in plans for row in plan.rows)
    assert len(controller.acceptance), "the last steps too"
    contexts = [[row.context_tokens for row in view_of(step=number).rows] for number in range(2 * MOST_HOLD_STEPS)]
    assert learnt == contexts, "costs are learnt by the contexts of the step itself"


def test_plans_that_come_out_alike_hold_ever_longer() -> None:
    controller, fresh = Counted(4, CPU), []
    for number in range(4 * MOST_HOLD_STEPS):
        before = controller.decided
        plan = step(controller, view_of(1, number))
        assert isinstance(plan.why, Decision)
        if controller.decided > before:
            fresh.append((number, plan.why.mode))
    speculating = [number for number, mode in fresh if mode == "speculating"]
    gaps = [after - before for before, after in itertools.pairwise(speculating)]
    assert gaps[0] == HOLD_STEPS
    assert max(gaps) in (MOST_HOLD_STEPS, MOST_HOLD_STEPS + 1), "one more where a step explores"
    exploring = [number for number, mode in fresh if mode == "exploring"]
    assert all(after - before >= EXPLORE_EVERY for before, after in itertools.pairwise(exploring))


def test_plans_end_where_steps_are_planned_for_before_the_one_before_has_ended() -> None:
    """As on a GPU: the host plans the next step while the device runs this one."""
    controller, waiting = Counted(4, CPU, trees=candidates((2, 2, 1, 1), 12)), list[StepResult]()
    fresh = []
    for number in range(6 * MOST_HOLD_STEPS):
        before, view = controller.decided, view_of(1, number)
        plan = controller.plan(view)
        fresh += [number] if controller.decided > before else []
        lengths = [row.speculation_length for row in plan.rows]
        rows = [RowResult.chain(row.sequence_id, k, k, k + 1) for row, k in zip(plan.rows, lengths, strict=True)]
        assert plan.predicted_s is not None
        waiting.append(StepResult(tuple(rows), view, plan, 0, 0.0, plan.predicted_s, plan.predicted_s))
        if len(waiting) > 1:
            controller.observe(waiting.pop(0))
    gaps = [after - before for before, after in itertools.pairwise(fresh)]
    assert max(gaps) <= MOST_HOLD_STEPS + 1
    assert len(fresh) < 6 * MOST_HOLD_STEPS / 4


def test_a_plan_for_other_trees_holds_as_short_as_the_first() -> None:
    reused, controller = ReusedPlan(), settled()
    long, short = controller.decide(view_of()), replace(controller.decide(view_of()), shapes=(chain_shape(1),) * 2)
    ends = []
    for place, decision in enumerate((long, long, long, short, short)):
        plan = Plan((), why=replace(decision))
        reused.observe(StepResult((), view_of(), plan, 0, 0.0, 0.0, 0.0), 100 * place)
        ends.append(next(step for step in range(1000) if reused.decision(100 * place + step) is None))
    assert ends == [HOLD_STEPS, 2 * HOLD_STEPS, MOST_HOLD_STEPS, HOLD_STEPS, 2 * HOLD_STEPS]


def test_plans_that_draft_nothing_hold_ever_longer_beside_the_same_rows() -> None:
    reused, plain = ReusedPlan(), plain_for_eight().decide(view_of(8))
    assert plain.mode == "not worth it"
    other = replace(plain, rows=view_of(8, sequence_id="other").rows)
    ends = []
    for place, decision in enumerate((plain, plain, plain, plain, other, other)):
        reused.observe(StepResult((), view_of(8), Plan((), why=replace(decision)), 0, 0.0, 0.0, 0.0), 100 * place)
        ends.append(next(step for step in range(1000) if reused.decision(100 * place + step) is None))
    assert ends == [HOLD_STEPS, 2 * HOLD_STEPS, MOST_HOLD_STEPS, MOST_HOLD_STEPS, HOLD_STEPS, 2 * HOLD_STEPS]


@pytest.mark.parametrize(
    "changed",
    [
        view_of(1),
        view_of(3),
        view_of(limit=3),
        view_of(limit=0),
        view_of(sequence_id="other"),
        view_of(match=2),
        view_of(others=(Option(3),)),
        view_of(max_time_per_token_s=1.0),
        replace(view_of(), prefill_tokens=5),
    ],
)
def test_a_change_is_planned_for(changed: BatchView) -> None:
    controller = settled()
    assert controller.plan(view_of()) is not None
    assert controller.decided == 0
    controller.plan(changed)
    assert controller.decided == 1


def test_a_plan_holds_while_a_row_is_believed_to_be_another() -> None:
    """Selections believe anew every few tokens. It is evidence like all else that the next plan counts."""
    controller = settled()
    controller.plan(view_of(belief=0.9))
    assert controller.decided == 0


def test_nodes_of_drafts_are_known_of_the_last_plan_for_the_same_rows_and_drafts() -> None:
    reused, decision = ReusedPlan(), settled().decide(view_of())
    assert reused.drafted(decision.rows) is None
    reused.observe(StepResult((), view_of(), Plan((), why=decision), 0, 0.0, 0.0, 0.0), 0)
    assert reused.drafted(view_of(step=1).rows) == {DRAFT: sum(shape.nodes for shape in decision.shapes)}
    assert reused.drafted(view_of(sequence_id="new").rows) is None
    assert reused.drafted(view_of(source="other").rows) is None


def test_planning_changes_nothing() -> None:
    controller = settled()
    first, second = controller.decide(view_of()), controller.decide(view_of())
    assert first.lengths == second.lengths
    assert first.predicted_s == second.predicted_s


def test_no_plan_holds_that_reads_a_long_text_first() -> None:
    """Its prediction is that of a single step."""
    controller = settled()
    first = step(controller, view_of(sequence_id="new", unread_tokens=300))
    following = step(controller, view_of(step=1, sequence_id="new"))
    assert controller.decided == 2
    assert first.predicted_s is not None
    assert following.predicted_s is not None
    assert following.predicted_s < first.predicted_s


def test_speculation_that_was_stopped_goes_on_for_rows_that_are_worth_it() -> None:
    """Drafting makes steps 1.6 times as long as its passes say. Rows of a cheaper draft come.

    It has not read their texts, which takes too long for a trial.
    """
    costs = replace(CPU, members={"cheap": CostTable.line(0.0, 1e-4, 1e-4)})
    controller = GoodputController(4, costs)

    def run(source: str, accepted: int, unread: int = 0) -> Plan:
        rows = [RowView(f"r{number}", 2100, 4, source=source, unread_tokens=unread) for number in range(2)]
        view = BatchView(tuple(rows))
        plan = controller.plan(view)
        lengths = [row.speculation_length for row in plan.rows]
        results = [
            RowResult.chain(row.sequence_id, k, min(k, accepted), min(k, accepted) + 1, source)
            for row, k in zip(rows, lengths, strict=True)
        ]
        draft_s = costs.of_draft(source).draft_s([2100] * 2, lengths)
        target_s = costs.target_s([2100] * 2, lengths)
        total_s = (target_s + draft_s) * (1.6 if any(lengths) else 1.0)
        controller.observe(StepResult(tuple(results), view, plan, 0, draft_s, target_s, total_s, 0, {source: draft_s}))
        return plan

    for number in range(600):
        run(DRAFT, number % 2)
    assert not controller.speculation.speculates
    plans = [run("cheap", 3, unread=2000) for _ in range(2 * HOLD_STEPS)]
    assert any(row.trees for plan in plans for row in plan.rows)


def test_plain_steps_hold_until_a_trial_is_due() -> None:
    controller = settled(steps=160, accepted=0)
    for number in range(40):
        step(controller, view_of(step=number), accepted=0)
    assert controller.decided < 20


def plain_for_eight(prefill_tokens: int = 0, **changed: Any) -> Counted:
    """A controller that has just decided for eight rows that nothing pays, with no trial in the next step."""
    controller = settled(steps=160, accepted=0)
    while True:
        controller.decided = 0
        plan = step(controller, replace(view_of(8, **changed), prefill_tokens=prefill_tokens), accepted=0)
        assert isinstance(plan.why, Decision)
        if controller.decided and plan.why.mode == "not worth it" and not controller.speculation.trial_is_due:
            controller.decided = 0
            return controller


@pytest.mark.parametrize(
    "changed",
    [view_of(7), view_of(9), view_of(8, sequence_id="other"), replace(view_of(8), prefill_tokens=5)],
    ids=["one fewer", "one more", "another", "prompts"],
)
def test_plain_decoding_goes_on_where_little_changes(changed: BatchView) -> None:
    controller = plain_for_eight()
    plan = controller.plan(changed)
    assert controller.decided == 0
    assert [row.sequence_id for row in plan.rows] == [row.sequence_id for row in changed.rows]
    assert not any(row.trees for row in plan.rows)
    assert isinstance(plan.why, Decision)
    assert plan.predicted_tokens == len(changed.rows)
    decided = controller.decide(changed)
    assert decided.mode == "not worth it"
    assert plan.predicted_s == pytest.approx(decided.predicted_s, rel=1e-3), "prompts included"


@pytest.mark.parametrize(
    "changed",
    [
        view_of(5),
        view_of(8, max_time_per_token_s=1.0),
        view_of(8, match=2),
        view_of(8, others=(Option(3, False, 2),)),
        BatchView(tuple([row._replace(sequence_id=f"new{n}") for n, row in enumerate(view_of(8).rows)])),
    ],
    ids=["far fewer", "a bound", "a lookup finds text", "another source finds text", "others"],
)
def test_plain_decoding_is_decided_anew_where_much_changes(changed: BatchView) -> None:
    controller = plain_for_eight()
    controller.plan(changed)
    assert controller.decided == 1


def test_plain_decoding_goes_on_where_a_lookup_finds_no_more_than_before() -> None:
    """Whether it is a row's first source or another one."""
    for found in (lambda match: {"match": match}, lambda match: {"others": (Option(3, False, match),)}):
        controller = plain_for_eight(**found(2))
        controller.plan(view_of(8, **found(2)))
        controller.plan(view_of(8, **found(1)))
        assert controller.decided == 0
        controller.plan(view_of(8, **found(3)))
        assert controller.decided == 1


def test_plain_decoding_beside_prompts_is_decided_anew_without_them() -> None:
    controller = plain_for_eight(64)
    controller.plan(replace(view_of(8), prefill_tokens=3))
    assert controller.decided == 0
    controller.plan(view_of(8))
    assert controller.decided == 1


def test_steps_with_other_rows_do_not_make_plain_decoding_hold_longer() -> None:
    controller, origins = plain_for_eight(), list[int]()
    for number in range(4 * HOLD_STEPS):
        before = controller.decided
        step(controller, view_of(8, sequence_id=f"other{number}"), accepted=0)
        origins += [number] if controller.decided > before else []
    gaps = [after - before for before, after in itertools.pairwise([-1, *origins])]
    assert max(gaps) <= HOLD_STEPS
    assert len(origins) <= 8, "looks at trials included"


@pytest.mark.parametrize(
    ("times", "mode"), [(5.0, "speculating"), (0.97, "within bounds"), (0.01, "bounds out of reach")]
)
def test_plans_within_bounds_hold_as_long_as_new_ones_do(times: float, mode: str) -> None:
    """In steps where plain decoding is due to be measured too: a bound may forbid it."""
    free = settled()
    why = free.decide(view_of(step=40))
    bound = times * 2 * why.predicted_s / why.predicted_tokens
    controller, modes = Counted(4, CPU), Counter[str]()
    for number in range(150):
        step(controller, view_of(step=40 + number % 2, max_time_per_token_s=bound))
    controller.decided = 0
    for number in range(16 * HOLD_STEPS):
        plan = step(controller, view_of(step=40 + number % 2, max_time_per_token_s=bound))
        assert isinstance(plan.why, Decision)
        modes[plan.why.mode] += 1
    assert modes.most_common(1)[0][0] == mode
    assert 16 <= controller.decided <= 22


def test_plain_plans_within_bounds_hold_beside_other_sources() -> None:
    controller = Counted(4, CPU, max_time_per_token_s=10.0)
    view = view_of(others=(Option(3, False, 2),))
    for _ in range(200):
        step(controller, view, accepted=0)
    controller.decided = 0
    for _ in range(40):
        step(controller, view, accepted=0)
    assert controller.decided <= 12


def test_another_draft_is_planned_for_at_once() -> None:
    controller = settled()
    controller.draft_changed(DraftChange())
    controller.plan(view_of())
    assert controller.decided == 1
