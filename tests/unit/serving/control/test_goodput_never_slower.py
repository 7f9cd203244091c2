"""Never slower for long than not speculating, also while every step reads prompts and no profile prices them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.proposers.base import ProposalRequest, Proposer

from ..conftest import MakeEngine
from ..machine import CPU, Machine

SLOW = CPU
FAST = LatencyModel(CostTable.line(1e-7, 5e-5, 5e-3), CostTable.line(1e-8, 1e-5, 1e-3))
MACHINES = pytest.mark.parametrize("latency", [SLOW, FAST], ids=["slower than guessed", "faster than guessed"])
PROMPTS: dict[str, Callable[[int], int]] = {
    "16 a step": lambda step: 16,
    "512 a step": lambda step: 512,
    "any number": lambda step: 1 + 7919 * step % 512,
    "after three steps": lambda step: 64 * (step > 2),
}


@MACHINES
@pytest.mark.parametrize("prompts", list(PROMPTS))
def test_a_useless_draft_is_found_out_while_every_step_reads_prompts(latency: LatencyModel, prompts: str) -> None:
    """The machine counts decoding alone, which is what speculation changes."""
    plain = Machine(latency, 0.0, prompts=PROMPTS[prompts]).run(FixedLength(0), 1000)
    machine = Machine(latency, 0.0, catches_up=True, prompts=PROMPTS[prompts])
    controller = GoodputController(8)
    assert machine.run(controller, 1000) > 0.96 * plain, "learning included"
    drafting = [any(lengths) for lengths in machine.lengths]
    assert any(drafting[:150]), "it was tried"
    assert sum(drafting[150:]) < 40, "trials alone"
    # Where all steps read equally many prompt tokens, decoding may be believed to take longer than it does.
    assert machine.run(controller, 1500) > 0.97 * plain


@MACHINES
@pytest.mark.parametrize("prompts", list(PROMPTS))
def test_a_good_draft_is_used_while_every_step_reads_prompts(latency: LatencyModel, prompts: str) -> None:
    reads = PROMPTS[prompts]
    best = max(Machine(latency, 0.9, prompts=reads).run(FixedLength(k), 400) for k in (4, 8))
    assert Machine(latency, 0.9, catches_up=True, prompts=reads).run(GoodputController(8), 800) > 0.9 * best


DEAR = [replace(FAST, draft=CostTable.line(1e-8, 1e-5, 4e-3)), replace(SLOW, draft=CostTable.line(1e-7, 2e-4, 2.5e-2))]


@pytest.mark.parametrize("first", [[512, 512, 512], [20, 512, 100]], ids=["alike", "any"])
@pytest.mark.parametrize("alpha", [0.4, 0.5])
@pytest.mark.parametrize("latency", DEAR, ids=["faster than guessed", "slower than guessed"])
def test_a_dear_draft_is_found_out_while_every_step_reads_as_many_prompt_tokens(
    latency: LatencyModel, alpha: float, first: list[int]
) -> None:
    """The first prompts are read while nothing decodes: these steps alone tell the costs of the passes apart."""
    prompts = PROMPTS["512 a step"]
    plain = Machine(latency, alpha, prompts=prompts).run(FixedLength(0), 1500)
    controller = GoodputController(8)
    read_alone(controller, latency, first)
    assert Machine(latency, alpha, catches_up=True, prompts=prompts).run(controller, 1500) > 0.95 * plain


FEW = LatencyModel(
    CostTable(((1.0, 0.027), (5.0, 0.0285), (16.0, 0.035), (64.0, 0.07), (512.0, 0.5)), 2e-7),
    CostTable(((1.0, 0.006), (8.0, 0.007), (64.0, 0.02)), 1e-7),
)  # SmolLM2 on two cores: up to five tokens cost about the same


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.32, 0.9])
@pytest.mark.parametrize("known", [FEW, None], ids=["measured", "guessed"])
def test_the_first_answer_is_no_slower_than_the_best_length(
    rows: int, alpha: float, known: LatencyModel | None
) -> None:
    """An answer of 128 tokens, none included among the lengths. Nothing is known of the draft before."""
    steps, seeds = 110, range(6)
    best = max(Machine(FEW, alpha, rows).run(FixedLength(k), 300) for k in range(5))
    rates = [Machine(FEW, alpha, rows, seed, catches_up=True).run(GoodputController(4, known), steps) for seed in seeds]
    assert sum(rates) / len(rates) > 0.95 * best


@pytest.mark.parametrize("alpha", [0.0, 0.32])
@pytest.mark.parametrize("prompts", ["16 a step", "any number"])
def test_the_first_answer_is_no_slower_while_every_step_reads_prompts(prompts: str, alpha: float) -> None:
    reads, seeds = PROMPTS[prompts], range(6)
    best = max(Machine(FEW, alpha, prompts=reads).run(FixedLength(k), 300) for k in range(5))
    machines = [Machine(FEW, alpha, seed=seed, catches_up=True, prompts=reads) for seed in seeds]
    rates = [machine.run(GoodputController(4, FEW), 110) for machine in machines]
    assert sum(rates) / len(rates) > 0.95 * best


@pytest.mark.parametrize("prompts", ["none", "any number"])
def test_a_worse_draft_is_found_out_after_a_swap(prompts: str) -> None:
    reads = PROMPTS.get(prompts, lambda step: 0)
    machine, controller = Machine(FEW, 0.9, catches_up=True, prompts=reads), GoodputController(4, FEW)
    machine.run(controller, 400)
    machine.alpha = 0.05
    controller.draft_changed(DraftChange())
    plain = Machine(FEW, 0.05, prompts=reads).run(FixedLength(0), 400)
    assert machine.run(controller, 110) > 0.96 * plain


def read_alone(controller: GoodputController, latency: LatencyModel, prompts: Sequence[int]) -> None:
    """Steps that read prompts while nothing decodes."""
    for tokens in prompts:
        view = BatchView((), tokens)
        seconds = latency.target_s([], [], tokens)
        controller.observe(StepResult((), view, controller.plan(view), tokens, 0.0, seconds, seconds))


def test_costs_of_prompts_are_learnt_beside_those_of_decoding() -> None:
    controller = GoodputController(8)
    Machine(SLOW, 0.5, prompts=PROMPTS["any number"]).run(controller, 300)
    for tokens in (50, 500):
        assert controller.latency.prompts_s(4, tokens) == pytest.approx(SLOW.prompts_s(4, tokens), rel=0.1)
    assert controller.latency.target.seconds(1000, 12) == pytest.approx(SLOW.target.seconds(1000, 12), rel=0.15)


def test_the_gain_of_speculation_is_measured_beside_prompts() -> None:
    """Costs are known, and predictions still fall short."""

    class Slow(Machine):
        """Speculating steps take twice what their parts say, reading prompts apart."""

        def run(self, controller: LengthController, steps: int) -> float:
            observe = controller.observe

            def slow(result: StepResult) -> None:
                prompts_s = CPU.prompts_s(len(result.view.rows), result.prefill_tokens)
                decoding_s = result.total_s - prompts_s
                factor = 2.0 if any(row.nodes for row in result.rows) else 1.0
                observe(replace(result, total_s=prompts_s + factor * decoding_s))

            controller.observe = slow  # type: ignore[method-assign]
            return super().run(controller, steps)

    machine = Slow(CPU, 0.6, prompts=lambda step: 40)
    machine.run(GoodputController(8, CPU), 400)
    assert any(map(any, machine.lengths[:100]))
    assert sum(any(lengths) for lengths in machine.lengths[200:]) < 20


class Always(Proposer):
    """Proposes one token again and again, and advances `clock` with every pass."""

    version = "always"

    def __init__(self, token: int) -> None:
        self.token, self.now = token, 0.0

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        self.now += 2e-3 * max(request.speculation_length for request in requests)
        return [TokenTree.chain([self.token] * request.speculation_length) for request in requests]


def serve(engine: Engine, proposer: Always, params: SamplingParams, steps: int) -> list[StepResult]:
    """Step with a new prompt before every step, on a clock that advances with the tokens read."""
    runner = engine.runner
    read = runner.read

    def timed(rows: Sequence[RowInput]) -> Tensor:
        proposer.now += 2e-2 + 1e-3 * sum(len(row.tokens) for row in rows)
        return read(rows)

    runner.read = timed  # type: ignore[method-assign]
    engine.clock = lambda: proposer.now
    results = []
    for step in range(steps):
        prompt = tuple(3 + (step * 31 + place * 7) % 200 for place in range(20))
        engine.submit(Request(str(step), prompt, params))
        result = engine.step().result
        assert result is not None
        assert result.prefill_tokens
        results.append(result)
    return results


@pytest.mark.parametrize("right", [False, True])
def test_an_engine_that_reads_a_prompt_a_step_learns_what_its_draft_is_worth(
    target: LanguageModel, make_engine: MakeEngine, right: bool
) -> None:
    """Token 65 is always drafted. It is banned, or the only one allowed."""
    proposer = Always(65)
    engine = make_engine(
        proposer_object=proposer,
        controller="goodput",
        speculation_length=4,
        max_slots=16,
        prefix_reuse=False,
        measure_costs_s=0,  # by this machine's clock, not the test's
    )
    wish = {"allowed_token_ids": [65]} if right else {"bad_word_ids": [[65]]}
    params = SamplingParams(temperature=0.0, max_tokens=30 if right else 8, ignore_eos=True, **wish)  # type: ignore[arg-type]
    results = serve(engine, proposer, params, 170)
    late = results[-80:]
    drafted = [sum(row.nodes for row in result.rows) for result in late]
    if right:
        assert sum(map(bool, drafted)) > 70
        assert sum(row.accepted for result in late for row in result.rows) == sum(drafted)
    else:
        assert sum(map(bool, drafted)) < 9
        trials = [result.plan.why.mode for result, tokens in zip(late, drafted, strict=True) if tokens]
        assert set(trials) <= {"trial"}


def test_a_step_shorter_than_its_prompts_were_believed_to_be_counts_as_zero() -> None:
    """Left out, it would leave the slow steps alone to speak for plain decoding."""
    controller = GoodputController(8, CPU)
    view = BatchView((RowView("r", 100, 0),), 4000)
    rows = (RowResult.chain("r", 0, 0, 1),)
    plan = controller.plan(view)
    assert plan.predicted_s == pytest.approx(CPU.target_s([100], [0], 4000), rel=1e-3)
    before = controller.speculation.measured.plain_rate(1.0)
    for _ in range(5):
        controller.observe(StepResult(rows, view, plan, 4000, 0.0, 1.0, 1.0))  # 6 s were expected
    assert controller.speculation.measured.plain_rate(1.0) > before
