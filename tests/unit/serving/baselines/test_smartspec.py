"""The paper's algorithms: expected lengths, one length by enumeration, admission by goodput, drafts gated by
confidence."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy
import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import EngineSettings, SamplingParams
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import AdmissionView, WaitingView
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.baselines.smartspec import RECENT_STEPS, Choice, MovingAcceptance, SmartSpecController, chain
from distillspec.serving.costs.fitted import Fitted
from distillspec.serving.costs.hardware_profile import ModelKey, PassKey, Profile, ProfiledDraft, machine, size_of
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide

from ..conftest import MakeEngine, hf_greedy, prompts
from ..test_engine_sampling import POLICIES, excess

CPU = LatencyModel(CostTable.line(1e-6, 1.5e-3, 4e-2), CostTable.line(1e-7, 2e-4, 5e-3))


def test_expected_tokens_of_a_chain() -> None:
    assert chain(0.7, 5) == pytest.approx(2.94, abs=0.01)
    assert (chain(0.0, 4), chain(1.0, 4), chain(0.5, 0)) == (1, 5, 1)


def test_acceptance_by_trial_follows_change() -> None:
    generator, moving = numpy.random.default_rng(0), MovingAcceptance(40)
    assert moving.rate() == pytest.approx(0.7)  # nothing seen: the prior
    for alpha in (0.7, 0.2):
        for _ in range(300):
            stood = [int((generator.random(5) < alpha).cumprod().sum()) for _ in range(4)]
            moving.observe(tuple(RowResult.chain(f"r{i}", 5, k, k + 1) for i, k in enumerate(stood)))
        assert moving.rate() == pytest.approx(alpha, abs=0.08)
    moving.observe((RowResult.chain("idle", 0, 0, 1),))
    assert moving.rate("idle") == moving.rate()
    moving.reset()
    assert moving.rate() == pytest.approx(0.7)


def test_requests_have_rates_of_their_own_until_the_window_has_passed() -> None:
    moving = MovingAcceptance(10)
    for _ in range(10):
        moving.observe((RowResult.chain("easy", 3, 3, 4), RowResult.chain("hard", 3, 0, 1)))
    assert moving.rate("easy") > 0.9
    assert moving.rate("hard") < 0.1
    for _ in range(10):
        moving.observe((RowResult.chain("other", 3, 0, 1),))
    assert moving.rate("easy") == moving.rate()


def view(*contexts: int, limit: int = 8) -> BatchView:
    return BatchView(tuple(RowView(f"r{i}", context, limit) for i, context in enumerate(contexts)))


def after(controller: SmartSpecController, batch: BatchView, accepted: int, steps: int) -> None:
    """Run steps in which `accepted` of the drafted tokens stand in every row."""
    for _ in range(steps):
        plan = controller.plan(batch)
        outcome = [(row.sequence_id, row.verified_length, min(row.verified_length, accepted)) for row in plan.rows]
        rows = tuple(RowResult.chain(name, k, stood, stood + 1) for name, k, stood in outcome)
        controller.observe(StepResult(rows, batch, plan, 0, 0.0, 0.1, 0.1))


def test_the_length_is_the_best_of_all() -> None:
    for rows, accepted in product((1, 4, 30), (0, 2, 8)):
        controller, batch = SmartSpecController(8, CPU), view(*[200] * rows)
        after(controller, batch, accepted, 40)
        plan, alpha = controller.plan(batch), controller.acceptance.rate()
        assert plan == controller.plan(batch)
        rates = [rows * chain(alpha, k) / CPU.step_s([200] * rows, [k] * rows) for k in range(9)]
        assert {row.speculation_length for row in plan.rows} == {int(numpy.argmax(rates))}
        assert plan.predicted_tokens is not None
        assert plan.predicted_s is not None
        assert plan.predicted_tokens / plan.predicted_s == pytest.approx(max(rates))
    assert SmartSpecController(8, CPU).plan(view()).rows == ()
    assert {row.speculation_length for row in SmartSpecController(8, CPU).plan(view(5, 5, limit=0)).rows} == {0}


def test_a_gated_draft_goes_as_far_as_it_may_and_goodput_says_what_is_verified() -> None:
    dear = LatencyModel(CostTable.line(0, 2e-2, 4e-2), CostTable.line(0, 0, 1e-4))
    controller, batch = SmartSpecController(8, dear, gated=True), view(10, 10)
    plan = controller.plan(batch)
    assert [row.speculation_length for row in plan.rows] == [8, 8]
    assert isinstance(plan.why, Choice)
    (verified,) = {row.verified_length for row in plan.rows}
    assert 0 < verified < 8
    assert verified == plan.why.goodputs.index(max(plan.why.goodputs))


def waiting(*requests: tuple[int, float]) -> tuple[WaitingView, ...]:
    return tuple(WaitingView(f"w{i}", tokens, waited) for i, (tokens, waited) in enumerate(requests))


def test_requests_are_admitted_while_goodput_rises() -> None:
    costly_context = LatencyModel(CostTable.line(1e-3, 1e-3, 1e-2), None)
    controller = SmartSpecController(4, costly_context, max_wait_s=5)
    running = (20, 20)
    assert controller.admit(AdmissionView(running, waiting((20, 0), (20, 0)), 8, 10_000)) == 2
    # A text of 5,000 tokens costs each step more than it gives, until it has waited too long; who comes after waits.
    queue = AdmissionView(running, waiting((20, 0.0), (5000, 0.0), (5000, 0.0)), 8, 100_000)
    assert controller.admit(queue) == 1
    assert controller.admit(replace(queue, waiting=waiting((20, 6.0), (5000, 6.0), (5000, 1.0)))) == 2
    assert controller.admit(replace(queue, waiting=waiting((5000, -3.0)))) == 0  # a clock that went back
    assert controller.admit(replace(queue, running=(), waiting=waiting((5000, 0.0)))) == 1
    assert controller.admit(replace(queue, waiting=())) == 0


def test_batches_without_room_for_k_and_one_are_no_candidates() -> None:
    controller = SmartSpecController(0, CPU)
    queue = waiting((20, 0), (20, 0), (20, 0))
    assert controller.admit(AdmissionView((20,), queue, 8, 84)) == 3  # 80 and one more a row
    assert controller.admit(AdmissionView((20,), queue, 8, 83)) == 2
    assert controller.admit(AdmissionView((20,), queue, 3, 1000)) == 2


def test_new_texts_are_not_read_by_the_draft_where_most_steps_propose_nothing() -> None:
    controller, batch = SmartSpecController(4, CPU), view(100)
    assert controller.plan(batch).rows[0].draft_prefill
    after(controller, batch, 0, 2 * RECENT_STEPS)
    assert {row.speculation_length for row in controller.plan(batch).rows} == {0}
    assert not controller.plan(batch).rows[0].draft_prefill
    after(controller, view(100, limit=0), 0, RECENT_STEPS)  # nobody left to draft for
    assert controller.plan(batch).rows[0].draft_prefill


def test_impossible_settings_are_refused_by_name() -> None:
    for make, name in (
        (lambda: SmartSpecController(-1, CPU), "speculation_length=-1"),
        (lambda: SmartSpecController(1, CPU, max_wait_s=-1.0), r"max_wait_s=-1\.0"),
        (lambda: MovingAcceptance(0), "window=0"),
        (lambda: MovingAcceptance(prior=2.0), r"prior=2\.0"),
        (lambda: EngineSettings(controller="smartspec"), "needs profile"),
        (lambda: EngineSettings(controller="fixed", max_time_per_token_s=0.1), "needs controller=goodput"),
        (lambda: EngineSettings(controller="fixed", lengths="step"), "lengths=step needs controller=goodput"),
        (lambda: EngineSettings(controller="goodput", lengths="row"), "lengths=row"),
        (lambda: EngineSettings(controller="goodput", max_time_per_token_s=-1), "must be above 0"),
    ):
        with pytest.raises(ConfigError, match=name):
            make()


@pytest.fixture
def profile(target: LanguageModel, draft: LanguageModel, tmp_path: Path) -> str:
    """Costs with which speculation pays."""
    cheap = Fitted(CostTable.line(0, 1e-6, 1e-5), 0.0, ())
    costs = Profile(
        machine(target.device),
        PassKey(),
        ModelKey.of(target),
        Fitted(CostTable.line(0, 1e-5, 1e-2), 0.0, ()),
        {DRAFT: ProfiledDraft(draft.name, size_of(draft), cheap)},
    )
    costs.save(tmp_path / "profile.json")
    return str(tmp_path)


def test_an_engine_under_it_writes_the_same_text(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, profile: str
) -> None:
    wanted = [hf_greedy(target, prompt, 24) for prompt in prompts()]
    engine = make_engine(
        draft, controller="smartspec", profile=profile, speculation_length=4, controller_options={"max_wait_s": 0.0}
    )
    outputs = engine.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=24))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(output.stats.proposed for output in outputs) > 0
    assert isinstance(engine.explain_last_plan(), Choice)


def test_rows_that_the_draft_is_not_to_read_are_left_to_lookups(
    draft: LanguageModel, make_engine: MakeEngine, profile: str
) -> None:
    controller = SmartSpecController(3, Profile.read(Path(profile)).latency)
    controller.idle_steps.extend([True] * RECENT_STEPS)
    engine = make_engine(
        draft, proposer="lookup_else_model", controller_object=controller, proposer_options={"shortest": 1}
    )
    proposer = engine.proposer
    repeated = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = engine.generate([prompts()[1]], repeated)  # a text that repeats itself
    assert output.stats.proposed > 0
    assert isinstance(proposer, SideBySide)
    model = proposer.proposers["draft"]
    assert isinstance(model, DraftModel)
    assert model.runner.passes == 0


def test_a_confidence_gate_leaves_the_distribution_alone(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, profile: str
) -> None:
    engine = make_engine(
        draft,
        controller="smartspec",
        profile=profile,
        speculation_length=4,
        draft_confidence=0.02,
        max_slots=64,
    )
    lengths: set[int] = set()

    def look(step: int) -> None:
        result = engine.last_result
        lengths.update(row.nodes for row in result.rows if result is not None)  # type: ignore[union-attr]

    params = POLICIES["plain"]
    assert float(excess(engine, target, params, between_steps=lambda step: look(step) if step else None).max()) < 5
    assert len(lengths) > 2, "the gate did nothing"
