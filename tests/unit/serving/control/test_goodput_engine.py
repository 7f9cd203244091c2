"""controller=goodput in an engine: the same text, its reasons, and what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving import Request, SamplingParams
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.acceptance_estimate import GLOBAL_ONLY_TRIALS, AcceptanceEstimate
from distillspec.serving.costs.latency import LatencyModel, guessed
from distillspec.serving.costs.table import CostTable

from ..conftest import MakeEngine, hf_greedy, prompts, ticks


def test_an_engine_with_it_writes_the_same_text_and_explains_itself(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    wanted = [hf_greedy(target, prompt, 40) for prompt in prompts()]
    engine = make_engine(draft, controller="goodput", speculation_length=5, measure_costs_s=0)
    engine.clock = ticks()
    assert engine.explain_last_plan() is None
    outputs = engine.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=40))
    assert [list(output.token_ids) for output in outputs] == wanted
    why, result = engine.explain_last_plan(), engine.last_result
    assert result is not None
    assert why is result.plan.why
    assert why.lengths == tuple(row.speculation_length for row in result.plan.rows)
    assert (why.predicted_tokens, why.predicted_s) == (result.plan.predicted_tokens, result.plan.predicted_s)
    start = guessed()
    assert why.latency.target != start.target, "costs were learnt"
    assert why.latency.draft != start.draft
    assert why.hazards != pytest.approx([0.6] * 5), "and acceptance"
    assert sum(output.stats.proposed for output in outputs) > 0


@pytest.mark.parametrize("lengths", ["step", "global"])
def test_an_engine_may_have_one_length_for_all_rows(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, lengths: str
) -> None:
    wanted = [hf_greedy(target, prompt, 30) for prompt in prompts()]
    engine = make_engine(draft, controller="goodput", speculation_length=4, lengths=lengths, measure_costs_s=0)
    engine.clock = ticks()
    controller = engine.controller
    assert isinstance(controller, GoodputController)
    assert (controller.acceptance.strength >= GLOBAL_ONLY_TRIALS) == (lengths == "global")
    requests = [
        Request(str(i), tuple(p), SamplingParams(temperature=0.0, max_tokens=30)) for i, p in enumerate(prompts())
    ]
    for request in requests:
        engine.submit(request)
    outputs, unlike, drafted = {}, 0, 0
    while engine.has_work:
        outputs.update({output.request_id: list(output.token_ids) for output in engine.step().finished})
        result = engine.last_result
        free = [row for row in result.view.rows if row.limit >= 4] if result is not None else []
        planned = {row.sequence_id: row.speculation_length for row in result.plan.rows} if result is not None else {}
        unlike += len({planned[row.sequence_id] for row in free}) > 1
        drafted += sum(planned.values())
    assert [outputs[request.id] for request in requests] == wanted
    assert (unlike, drafted > 0) == (0, True)


def test_rows_without_a_match_are_not_counted_on(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(
        None,
        proposer="prompt_lookup",
        proposer_options={"shortest": 1},
        controller="goodput",
        speculation_length=4,
        max_model_len=300,
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, bad_word_ids=[[5]])
    engine.submit(Request("found", tuple(range(3, 250)), params))  # whatever comes next is in the prompt
    engine.submit(Request("new", (5,), params))  # the next token is another one
    engine.step()
    output = engine.step()
    found, new = engine.last_result.view.rows  # type: ignore[union-attr]
    assert not found.drafted_by_model
    assert not new.drafted_by_model
    assert found.match > 0
    assert found.limit > 0
    assert (new.match, new.limit) == (0, 0)
    assert [row.nodes for row in output.result.rows if row.sequence_id == "new/0"] == [0]  # type: ignore[union-attr]


def test_a_swapped_draft_starts_with_a_clean_record(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    save_draft(draft, tmp_path / "next", target)
    engine = make_engine(draft, controller="goodput", speculation_length=3, measure_costs_s=0)
    engine.clock = ticks()
    engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    controller = engine.controller
    assert isinstance(controller, GoodputController)
    fresh = AcceptanceEstimate(3).hazards().tolist()
    assert controller.acceptance.hazards().tolist() != fresh
    engine.load_draft(tmp_path / "next")
    engine.step()
    assert controller.acceptance.hazards().tolist() == fresh


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_lengths_are_priced_as_the_draft_drafts_them(target: LanguageModel, make_engine: MakeEngine, kind: str) -> None:
    """A block's further tokens cost next to nothing here, a pass a token costs much."""
    wanted = [hf_greedy(target, prompt, 20) for prompt in prompts(3)]
    draft = initialise_draft(DraftConfig(kind=kind), target)
    engine = make_engine(draft, controller="goodput", speculation_length=4, measure_costs_s=0)
    controller = engine.controller
    assert isinstance(controller, GoodputController)
    controller.use_costs(LatencyModel(CostTable.line(0, 1e-5, 1.0), CostTable.line(0, 1e-5, 0.5)))
    for i, prompt in enumerate(prompts(3)):
        engine.submit(Request(str(i), tuple(prompt), SamplingParams(temperature=0.0, max_tokens=20)))
    texts, latency = {}, None
    while engine.has_work:
        texts.update({output.request_id: list(output.token_ids) for output in engine.step().finished})
        if (result := engine.last_result) is not None and any(row.limit for row in result.view.rows):
            latency = result.plan.why.latency
    assert [texts[str(i)] for i in range(3)] == wanted
    assert latency is not None
    own = latency.of_draft(drafts_block=kind == "block")
    passes = 1 if kind == "block" else 4
    assert own.loop_s(2, 0, 4) == pytest.approx(passes * own.draft.seconds(0, 2 * 4 / passes, 2))
