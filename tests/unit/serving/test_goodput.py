"""Lengths that pay: the optimum against brute force, estimates against known truths, a controller on known machines."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, save_draft
from distillspec.serving import Request, SamplingParams
from distillspec.serving.control.acceptance import AcceptanceEstimate
from distillspec.serving.control.allocation import Batch, best_by_row, best_for_all
from distillspec.serving.control.base import BatchView, LengthController, RowResult, RowView, StepResult
from distillspec.serving.control.calibration import CostCalibration
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.latency import ForwardCost, LatencyModel

from .conftest import MakeEngine, hf_greedy, prompts
from .machine import CPU, Machine


def goodput(
    survival: numpy.ndarray,
    lengths: tuple[int, ...],
    contexts: list[int],
    latency: LatencyModel,
    by_model: list[bool] | None = None,
) -> float:
    """Expected tokens a second, by definition."""
    tokens = sum(1 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tokens / latency.step_s(contexts, lengths, 0, by_model)


def test_costs_count_roots_and_a_draft_batch_that_shrinks() -> None:
    latency = LatencyModel(ForwardCost(0.5, 2.0, 10.0), ForwardCost(0.25, 1.0, 3.0))
    # Target: 30 context, 2 roots and 3 drafted. Draft: depth 1 both rows, depth 2 the first alone.
    assert latency.step_s([10, 20], [2, 1]) == (15 + 10 + 10) + (0.25 * 30 + 2 + 3) + (2.5 + 1 + 3)
    assert latency.step_s([10], [0], prefill_tokens=4) == 5 + 2 * 5 + 10
    assert LatencyModel(ForwardCost(0, 0, 1.0), None, 0.125).step_s([1], [3]) == 1.125
    free = LatencyModel(latency.target, None, 0.125)
    for model, length in product((latency, free), range(4)):
        assert model.alike_s(3, 60, length) == model.step_s([10, 20, 30], [length] * 3)


def test_a_pass_that_only_two_rows_pay_for_is_found() -> None:
    latency = LatencyModel(ForwardCost(0, 0, 10.0), ForwardCost(0, 0, 6.0))
    survival = numpy.array([[0.9], [0.9]])
    best = best_by_row(Batch(survival, numpy.array([1, 1]), numpy.array([5, 5]), latency))
    assert best.lengths.tolist() == [1, 1]
    assert best.goodput == pytest.approx(3.8 / 16)


def test_experts_are_loaded_once_for_all_tokens() -> None:
    mixtral = ForwardCost(0, 0, 1.0, per_expert=0.5, experts=8, active=2)
    assert mixtral.loaded_experts(1.0) == pytest.approx(2)
    assert mixtral.loaded_experts(6.0) == pytest.approx(6.58, abs=0.01)
    # Two rows with two drafted tokens each: six tokens verified, roots included.
    assert LatencyModel(mixtral).target_s([10, 20], [2, 2]) == pytest.approx(1 + 0.5 * mixtral.loaded_experts(6.0))


HAZARDS = st.lists(st.floats(0, 1), min_size=3, max_size=3)
COSTS = st.builds(ForwardCost, *(st.floats(0, limit) for limit in (0.01, 0.3, 3.0)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(HAZARDS, st.integers(0, 3), st.integers(0, 50)), max_size=3),
    COSTS,
    COSTS | st.none(),
    st.just(0.0) | st.floats(0, 1),
    st.none() | st.lists(st.booleans(), min_size=3, max_size=3),
    st.just(()) | st.tuples(*(st.tuples(st.just(n), st.floats(-0.05, 2)) for n in (1.0, 3.0, 4.0, 9.0))),
)
def test_the_optimum_is_brute_forces(
    rows: list[tuple[list[float], int, int]],
    target: ForwardCost,
    draft: ForwardCost | None,
    per_expert: float,
    models: list[bool] | None,
    bumps: tuple[tuple[float, float], ...],
) -> None:
    target = replace(target, fixed=target.fixed + 0.1, per_expert=per_expert, experts=8, active=2, bumps=bumps)
    latency = LatencyModel(target, draft, 0.2)
    survival = numpy.cumprod(numpy.array([hazards for hazards, _, _ in rows]).reshape(-1, 3), 1)
    limits = numpy.array([limit for _, limit, _ in rows], dtype=numpy.int64)
    contexts = numpy.array([context for _, _, context in rows], dtype=numpy.int64)
    by_model = None if models is None else models[: len(rows)]
    batch = Batch(
        survival, limits, contexts, latency, 0, None if by_model is None else numpy.array(by_model, dtype=bool)
    )
    best = best_by_row(batch)
    assert (best.lengths <= limits).all()
    if not rows:
        return
    every = product(*(range(limit + 1) for limit in limits))

    def rate(lengths: tuple[int, ...]) -> float:
        return goodput(survival, lengths, contexts.tolist(), latency, by_model)

    brute = max(map(rate, every))
    assert rate(tuple(best.lengths.tolist())) == pytest.approx(brute)
    assert best.goodput == pytest.approx(brute)
    common = best_for_all(batch)
    assert common.goodput <= brute * (1 + 1e-9)
    alike = (rate(tuple(numpy.minimum(limits, k).tolist())) for k in range(4))
    assert common.goodput == pytest.approx(max(alike))


def test_what_lies_behind_a_rejection_was_never_tried() -> None:
    generator = numpy.random.default_rng(0)
    estimate = AcceptanceEstimate(5, global_memory=1e6)
    for _ in range(3000):
        accepted = int((generator.random(5) < 0.7).cumprod().sum())
        estimate.observe([RowResult("a", 5, accepted, accepted + 1)])
    # Accepted over proposed would be 0.39.
    assert estimate.hazards == pytest.approx(numpy.full(5, 0.7), abs=0.05)
    assert 1 + estimate.survival(["a"]).sum() == pytest.approx(2.94, abs=0.35)


def test_requests_move_from_the_global_estimate_to_their_own() -> None:
    estimate = AcceptanceEstimate(2, strength=10)
    for _ in range(200):
        estimate.observe([RowResult("easy", 2, 2, 3), RowResult("hard", 2, 0, 1)])
    easy, hard, new = estimate.survival(["easy", "hard", "new"])[:, 0]
    assert easy > 0.9
    assert hard < 0.1
    assert new == pytest.approx(0.5, abs=0.05)
    assert GoodputController(2, acceptance=estimate).acceptance is estimate
    everyone = AcceptanceEstimate(2, strength=float("inf"))
    assert GoodputController(2, acceptance=everyone).acceptance is everyone  # an estimate that knows nobody yet is one
    everyone.observe([RowResult("easy", 2, 2, 3)])
    assert len({tuple(row) for row in everyone.survival(["easy", "new"]).tolist()}) == 1
    estimate.keep_only(["easy"])
    assert len(estimate) == 1
    assert estimate.survival(["hard"])[0, 0] == pytest.approx(new)
    estimate.reset()
    assert estimate.survival(["easy"])[0, 0] == pytest.approx(0.6)


def test_lookups_are_told_apart_by_the_length_of_their_match() -> None:
    estimate = AcceptanceEstimate(2)
    for _ in range(100):
        estimate.observe([RowResult("a", 2, 2, 3), RowResult("b", 2, 0, 1)], [4, 2])
    long, short, model = estimate.survival(["x", "x", "x"], [4, 2, 0])[:, 0]
    assert long > 0.9
    assert short < 0.1
    assert model == pytest.approx(0.6)  # nothing was seen of one
    assert estimate.survival(["b"], [4])[0, 0] == pytest.approx(long)  # its own evidence is of short matches


def test_steps_without_drafts_teach_nothing() -> None:
    estimate = AcceptanceEstimate(3)
    before = estimate.hazards
    estimate.observe([])
    estimate.observe([RowResult("a", 0, 0, 1)])
    assert (estimate.hazards == before).all()
    assert estimate.survival([]).shape == (0, 3)


def work(generator: numpy.random.Generator) -> tuple[float, float, float]:
    return float(generator.integers(100, 4000)), float(generator.integers(1, 40)), 1.0


def test_costs_are_learnt_and_followed_and_spikes_are_not() -> None:
    generator = numpy.random.default_rng(1)
    truth = ForwardCost(2e-6, 8e-4, 4e-2)
    learnt = CostCalibration(ForwardCost(1e-7, 1e-3, 2e-2), confidence=1e-2)

    def watch(steps: int, truth: ForwardCost, spikes: bool = False) -> float:
        """The median relative error of predictions, made before each step is seen."""
        errors = []
        for step in range(steps):
            context, tokens, passes = work(generator)
            seconds = truth.seconds(context, tokens) * float(generator.normal(1, 0.02))
            errors.append(abs(learnt.cost.seconds(context, tokens) / seconds - 1))
            learnt.observe(context, tokens, passes, 3.0 if spikes and step % 40 == 20 else seconds)
        return float(numpy.median(errors[steps // 2 :]))

    assert watch(200, truth) < 0.03
    assert watch(200, truth, spikes=True) < 0.06
    slower = ForwardCost(4e-6, 1.6e-3, 8e-2)
    assert watch(400, slower) < 0.04


def test_the_cost_of_experts_is_learnt() -> None:
    generator = numpy.random.default_rng(2)
    truth = ForwardCost(0, 1e-4, 5e-3, per_expert=4e-3, experts=8, active=2)
    learnt = CostCalibration(replace(truth, per_expert=0.0, fixed=2e-2), confidence=1e-2)
    for _ in range(300):
        tokens = float(generator.integers(1, 40))
        learnt.observe(100, tokens, 1, truth.seconds(100, tokens))
    for tokens in (1.0, 4.0, 30.0):
        assert learnt.cost.seconds(100, tokens) == pytest.approx(truth.seconds(100, tokens), rel=0.02)


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_line_that_is_off_is_followed_as_it_is_off(slower: float) -> None:
    generator = numpy.random.default_rng(3)
    profile = ForwardCost(1e-6, 1e-3, 2e-2, bumps=((1.0, -5e-3), (4.0, 2e-2), (8.0, 1.7e-2)))
    assert profile.seconds(0, 6) == pytest.approx(2e-2 + 6e-3 + 1.85e-2)  # halfway down from 4 to 8
    bumps = tuple((tokens, slower * seconds) for tokens, seconds in profile.bumps)
    truth = ForwardCost(slower * 1e-6, slower * 1e-3, slower * 2e-2, bumps=bumps)
    learnt = CostCalibration(profile, confidence=1.0)
    for _ in range(200):
        tokens = float(generator.integers(1, 12))
        learnt.observe(100, tokens, 1, truth.seconds(100, tokens))
    for tokens in (1.0, 4.0, 11.0):
        assert learnt.cost.seconds(100, tokens) == pytest.approx(truth.seconds(100, tokens), rel=0.02)


def test_more_tokens_are_never_believed_to_cost_less_than_fewer() -> None:
    """Steps of a machine that is slow on one token, and of one whose line flattens under the profile's bumps."""
    generator = numpy.random.default_rng(4)
    slow_on_one = ForwardCost(1e-6, 1e-3, 2e-2, bumps=((1.0, 8e-3), (2.0, 0.0), (8.0, 2e-2)))
    stairs = ForwardCost(1e-6, 2e-3, 2e-2, bumps=((1.0, 0.0), (4.0, 6e-3), (8.0, -2e-3), (9.0, 9e-3)))
    for profile, seconds in ((slow_on_one, slow_on_one.seconds), (stairs, lambda context, tokens: 3e-2)):
        learnt = CostCalibration(profile, confidence=1.0)
        for _ in range(100):
            tokens = float(generator.integers(1, 12))
            learnt.observe(100, tokens, 1, seconds(100, tokens))
        costs = [learnt.cost.seconds(100, tokens) for tokens in range(1, 12)]
        assert costs == pytest.approx(numpy.maximum.accumulate(costs).tolist())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_no_clock_gives_are_left_out(seconds: float) -> None:
    learnt = CostCalibration(ForwardCost(1e-6, 1e-3, 1e-2))
    before = learnt.cost
    learnt.observe(100, 5, 1, seconds)
    learnt.observe(100, 5, 0, 1.0)
    assert learnt.cost == before


@pytest.mark.parametrize(("alpha", "steps", "runs"), [(0.0, 1500, 1), (0.3, 3000, 3), (0.6, 1500, 1), (0.9, 1500, 1)])
def test_goodput_comes_near_the_best_fixed_length(alpha: float, steps: int, runs: int) -> None:
    """At 0.3 the best gains 4 %: whether it is found is luck, so runs are averaged."""
    best = max(Machine(CPU, alpha).run(FixedLength(k), 400) for k in range(9))
    for profile in (CPU, None):
        rates = [Machine(CPU, alpha, seed=seed).run(GoodputController(8, profile), steps) for seed in range(runs)]
        assert sum(rates) / runs > 0.97 * best


def test_a_useless_draft_costs_almost_nothing() -> None:
    plain = Machine(CPU, 0.0).run(FixedLength(0), 1000)
    assert Machine(CPU, 0.0).run(GoodputController(8, CPU), 4000) > 0.98 * plain


@pytest.mark.parametrize("factor", [20.0, 800.0])
def test_one_pause_of_the_machine_changes_nothing(factor: float) -> None:
    """A pass that is compiled, a neighbour that takes the cores: in a step that speculates and in one that does not."""
    alone = Machine(CPU, 0.7).run(GoodputController(8, CPU), 600)
    for step in (40, 200):
        controller = GoodputController(8, CPU)
        Machine(CPU, 0.7, pauses={step: factor}).run(controller, step + 1)
        assert Machine(CPU, 0.7).run(controller, 600) > 0.97 * alone


def test_trials_cost_less_than_one_percent() -> None:
    """Reading up what the draft has missed included."""
    plain = Machine(CPU, 0.0).run(FixedLength(0), 2000)
    machine, controller = Machine(CPU, 0.0, reads_up=True), GoodputController(8, CPU)
    machine.run(controller, 300)  # it has found out
    assert machine.run(controller, 4000) > 0.99 * plain


def test_speculation_comes_back_by_itself_when_text_becomes_easy() -> None:
    machine, controller = Machine(CPU, 0.0, reads_up=True), GoodputController(8, CPU)
    machine.run(controller, 1000)
    machine.alpha = 0.9
    machine.run(controller, 3000)
    best = Machine(CPU, 0.9).run(FixedLength(8), 600)
    assert machine.run(controller, 600) > 0.95 * best


def test_every_position_has_an_estimate_of_its_own_that_forgets() -> None:
    estimate = AcceptanceEstimate(3)
    generator = numpy.random.default_rng(0)

    def draft(hazards: tuple[float, ...], times: int) -> None:
        for _ in range(times):
            stood = int((generator.random(3) < hazards).cumprod().sum())
            estimate.observe([RowResult("a", 3, stood, stood + 1)])

    draft((0.9, 0.5, 0.1), 3000)
    assert estimate.hazards.tolist() == pytest.approx([0.9, 0.5, 0.1], abs=0.06)
    draft((0.2, 0.2, 0.2), 3000)
    assert estimate.hazards[0] == pytest.approx(0.2, abs=0.06)


def test_speculation_comes_back_with_a_better_draft() -> None:
    controller = GoodputController(8, CPU)
    machine = Machine(CPU, 0.0)
    machine.run(controller, 1000)
    view = BatchView((RowView("r0", 100, 8),))
    assert controller.decide(view).mode in ("not worth it", "trial")
    machine.alpha = 0.9
    controller.draft_changed()
    assert controller.decide(view).mode == "speculating"
    rate = machine.run(controller, 1000)
    assert rate > 1.3 * machine.run(FixedLength(0), 500)


def test_costs_nobody_told_it_of_switch_speculation_off() -> None:
    class Slow(Machine):
        """Every speculating step takes twice what its parts say."""

        def run(self, controller: LengthController, steps: int) -> float:
            observe = controller.observe

            def slow(result: StepResult) -> None:
                factor = 2.0 if any(row.proposed for row in result.rows) else 1.0
                observe(replace(result, total_s=factor * result.total_s))

            controller.observe = slow  # type: ignore[method-assign]
            return super().run(controller, steps)

    controller = GoodputController(8, CPU)
    Slow(CPU, 0.6).run(controller, 300)
    assert controller.decide(BatchView((RowView("r0", 100, 8),))).mode in ("not worth it", "trial")


def test_impossible_settings_are_refused_by_name() -> None:
    for make, name in (
        (lambda: ForwardCost(-1, 0, 0), "per_context=-1"),
        (lambda: ForwardCost(0, float("nan"), 0), "per_token=nan"),
        (lambda: ForwardCost(0, 0, 0, per_expert=1.0), r"per_expert=1\.0"),
        (lambda: ForwardCost(0, 0, 0, experts=2, active=3), "active=3"),
        (lambda: LatencyModel(CPU.target, ForwardCost(0, 0, 0, experts=8, active=2)), "experts=8"),
        (lambda: LatencyModel(CPU.target, draft_free_s=-1.0), r"draft_free_s=-1\.0"),
        (lambda: GoodputController(-1), "longest=-1"),
        (lambda: AcceptanceEstimate(4, prior=1.0), r"prior=1\.0"),
        (lambda: CostCalibration(ForwardCost(0, 0, 0), forgetting=0.0), r"forgetting=0\.0"),
    ):
        with pytest.raises(ConfigError, match=name):
            make()


def test_an_engine_with_it_writes_the_same_text_and_explains_itself(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    wanted = [hf_greedy(target, prompt, 40) for prompt in prompts()]
    engine = make_engine(draft, controller="goodput", speculation_length=5)
    assert engine.explain_last_plan() is None
    outputs = engine.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=40))
    assert [list(output.token_ids) for output in outputs] == wanted
    why, result = engine.explain_last_plan(), engine.core.last_result
    assert result is not None
    assert why is result.plan.why
    assert why.lengths == tuple(row.length for row in result.plan.rows)
    assert (why.predicted_tokens, why.predicted_s) == (result.plan.predicted_tokens, result.plan.predicted_s)
    guess = engine.guessed_costs(5)
    assert why.target != guess.target, "costs were learnt"
    assert why.draft != guess.draft
    assert why.hazards != pytest.approx([0.6] * 5), "and acceptance"
    assert sum(output.stats.proposed for output in outputs) > 0


@pytest.mark.parametrize("lengths", ["step", "global"])
def test_an_engine_may_have_one_length_for_all_rows(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, lengths: str
) -> None:
    wanted = [hf_greedy(target, prompt, 30) for prompt in prompts()]
    engine = make_engine(draft, controller="goodput", speculation_length=4, lengths=lengths)
    controller = engine.core.controller
    assert isinstance(controller, GoodputController)
    assert (controller.acceptance.strength == float("inf")) == (lengths == "global")
    requests = [
        Request(str(i), tuple(p), SamplingParams(temperature=0.0, max_tokens=30)) for i, p in enumerate(prompts())
    ]
    for request in requests:
        engine.submit(request)
    outputs, unlike, drafted = {}, 0, 0
    while engine.has_work:
        outputs.update({output.request_id: list(output.token_ids) for output in engine.step().finished})
        result = engine.core.last_result
        free = [row for row in result.view.rows if row.limit >= 4] if result is not None else []
        planned = {row.sequence_id: row.length for row in result.plan.rows} if result is not None else {}
        unlike += len({planned[row.sequence_id] for row in free}) > 1
        drafted += sum(planned.values())
    assert [outputs[request.id] for request in requests] == wanted
    assert (unlike, drafted > 0) == (0, True)


def test_rows_without_a_match_are_not_counted_on(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(
        None, proposer="prompt_lookup", lookup_shortest=1, controller="goodput", speculation_length=4, max_model_len=300
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, bad_word_ids=[[5]])
    engine.submit(Request("found", tuple(range(3, 250)), params))  # whatever comes next stands in the prompt
    engine.submit(Request("new", (5,), params))  # the next token is another one
    engine.step()
    output = engine.step()
    found, new = engine.core.last_result.view.rows  # type: ignore[union-attr]
    assert not found.drafted_by_model
    assert not new.drafted_by_model
    assert found.match > 0
    assert found.limit > 0
    assert (new.match, new.limit) == (0, 0)
    assert [row.proposed for row in output.result.rows if row.sequence_id == "new/0"] == [0]  # type: ignore[union-attr]


def test_a_swapped_draft_starts_with_a_clean_record(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    save_draft(draft, tmp_path / "next", target)
    engine = make_engine(draft, controller="goodput", speculation_length=3)
    engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    controller = engine.core.controller
    assert isinstance(controller, GoodputController)
    assert controller.acceptance.trials > 0
    engine.load_draft(tmp_path / "next")
    engine.step()
    assert controller.acceptance.trials == 0
