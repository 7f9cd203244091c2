"""Controllers with empty batches, too little evidence, and impossible times."""

from __future__ import annotations

from itertools import count

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import EngineSettings, SamplingParams
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.baselines.by_name import CONTROLLER_NAMES, named_controller
from distillspec.serving.baselines.smartspec import MovingAcceptance
from distillspec.serving.baselines.tree_names import TREE_NAMES
from distillspec.serving.control.decision import Decision
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel, guessed
from distillspec.serving.costs.table import CostTable

from ..conftest import MakeEngine, hf_greedy, prompts

CPU = LatencyModel(CostTable.line(1e-6, 1.5e-3, 4e-2), CostTable.line(1e-7, 2e-4, 5e-3))
NUMBERS = str.maketrans({"K": "3", "W": "2", "N": "4", "D": "3"})
NAMES = [name.translate(NUMBERS) for name in (*CONTROLLER_NAMES, *TREE_NAMES)]
ONE = BatchView((RowView("a", 100, 8),))


def step(controller: LengthController, view: BatchView, *, accepted: int = 1, seconds: float | None = None) -> Plan:
    """Plan and observe one step that took what the machine says, or `seconds`."""
    plan = controller.plan(view)
    lengths, contexts = [row.speculation_length for row in plan.rows], [row.context_tokens for row in view.rows]
    stood = [min(length, accepted) for length in lengths]
    rows = tuple(RowResult.chain(r.sequence_id, k, s, s + 1) for r, k, s in zip(view.rows, lengths, stood, strict=True))
    draft_s, target_s = CPU.draft_s(contexts, lengths), CPU.target_s(contexts, lengths)
    parts = (draft_s, target_s, draft_s + target_s) if seconds is None else (seconds,) * 3
    controller.observe(StepResult(rows, view, plan, 0, *parts))
    return plan


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_and_an_empty_history_have_plans(name: str) -> None:
    controller = named_controller(name, 6, CPU)
    assert step(controller, BatchView(())).rows == ()
    assert step(controller, BatchView((), prefill_tokens=50, waiting=3)).rows == ()
    (row,) = step(controller, ONE).rows
    assert 0 <= row.speculation_length <= 6
    assert [r.speculation_length for r in step(controller, BatchView((RowView("a", 100, 0),))).rows] == [0]


@pytest.mark.parametrize("name", ["goodput", "goodput-step", "goodput-global", "smartspec", "smartspec-request"])
def test_one_request_alone_comes_to_the_length_that_pays(name: str) -> None:
    controller = named_controller(name, 6, CPU)
    for _ in range(150):
        step(controller, ONE, accepted=6)
    assert controller.plan(ONE).rows[0].speculation_length == 6
    controller.draft_changed(DraftChange())
    for _ in range(150):
        step(controller, ONE, accepted=0)
    assert sum(step(controller, ONE, accepted=0).rows[0].speculation_length for _ in range(50)) < 25


@pytest.mark.parametrize("name", ["goodput", "goodput-step", "smartspec"])
@pytest.mark.parametrize("target", [CPU.target, CostTable.line(0, 0, 0)])
def test_drafts_that_cost_nothing_are_taken_as_far_as_they_go(name: str, target: CostTable) -> None:
    free = LatencyModel(CostTable.line(target.per_context, 0, target.seconds(0, 0)), CostTable.line(0, 0, 0))
    plan = named_controller(name, 6, free).plan(ONE)
    assert plan.rows[0].speculation_length == 6
    assert plan.predicted_s is not None
    assert plan.predicted_s > 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["goodput", "smartspec"])
def test_impossible_times_change_no_belief_about_costs(name: str, seconds: float) -> None:
    told, spared = named_controller(name, 6, CPU), named_controller(name, 6, CPU)
    for place in range(60):
        step(spared, ONE)
        step(told, ONE, seconds=seconds if place % 3 == 0 else None)
    if isinstance(told, GoodputController) and isinstance(spared, GoodputController):
        assert told.latency.target.seconds(100, 3) == pytest.approx(spared.latency.target.seconds(100, 3), rel=1e-3)
        why = told.plan(ONE).why
        assert isinstance(why, Decision)
        assert 0 < why.best_tokens_per_s < 1000
    assert told.plan(ONE).rows == spared.plan(ONE).rows


def test_an_engine_whose_clock_goes_back_writes_the_same_text(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    wanted = [hf_greedy(target, prompt, 24) for prompt in prompts(3)]
    engine = make_engine(draft, controller="goodput", speculation_length=4, measure_costs_s=0)
    ticks = count()
    engine.clock = lambda: 1000.0 - 0.01 * next(ticks)
    outputs = engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=24))
    assert [list(output.token_ids) for output in outputs] == wanted
    why, guess = engine.explain_last_plan(), guessed()
    assert (why.latency.target, why.latency.draft) == (guess.target, guess.draft), "times below 0 teach nothing"
    assert sum(output.stats.proposed for output in outputs) > 0


def test_a_controller_that_drafts_more_than_the_engine_was_made_for_is_refused(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    wanted = [hf_greedy(target, prompt, 12) for prompt in prompts(2)]
    engine = make_engine(draft, speculation_length=3)
    before = engine.controller
    with pytest.raises(ConfigError, match=r"up to 4 tokens .* made for 3; give it speculation_length=4"):
        engine.use_controller(FixedLength(4))
    assert engine.controller is before
    engine.use_controller(FixedLength(1))
    assert engine.limits.lookahead == 1
    engine.use_controller(FixedLength(3))  # what it was made for, not what the last one wanted
    outputs = engine.generate(prompts(2), SamplingParams(temperature=0.0, max_tokens=12))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert max(max(output.stats.tried_per_position, default=0) for output in outputs) > 0
    engine.check_integrity()


def test_names_and_averages_that_cannot_be_are_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="policy quick is not known"):
        named_controller("quick", 4, CPU)
    for name in ("smartspec", "smartspec-request"):
        with pytest.raises(ConfigError, match=f"policy {name} needs costs"):
            named_controller(name, 4, None)
    assert MovingAcceptance().rate("nobody") == MovingAcceptance().rate()
    with pytest.raises(ConfigError, match="needs profile"):
        EngineSettings(controller="smartspec")
