"""What a draft reads before it drafts: the prediction, and what the engine does."""

from __future__ import annotations

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.catch_up import CATCH_UP_TOKENS_A_STEP, READ_WITH_DRAFTING, catch_up_cost
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.proposers.draft_model import DraftModel

from ..conftest import MakeEngine, prompts


@pytest.mark.parametrize(
    ("unread", "expected"),
    [
        ([], (0, 0)),
        ([1, 1], (0, 0)),
        ([2, 1], (1, 0)),
        ([8], (7, 0)),
        ([9, 1], (8, 1)),
        ([400, 400], (CATCH_UP_TOKENS_A_STEP, 1)),
    ],
)
def test_tokens_and_passes_of_catch_up_prefill(unread: list[int], expected: tuple[int, int]) -> None:
    assert catch_up_cost(unread) == expected


def test_catch_up_prefill_is_priced_as_a_pass_of_its_own() -> None:
    target = CostTable.line(0.0, 1e-3, 1e-2)
    assert LatencyModel(target, CostTable.line(0.0, 1e-4, 5e-3)).catch_up_s([21, 1]) == pytest.approx(5e-3 + 20e-4)
    assert LatencyModel(target, None).catch_up_s([21]) == 0.0


@pytest.mark.parametrize("plain_steps", [3, 12])
def test_the_draft_runs_as_many_passes_as_predicted(
    draft: LanguageModel, make_engine: MakeEngine, plain_steps: int
) -> None:
    engine = make_engine(draft, speculation_length=4, controller="fixed")
    proposer = engine.proposer
    assert isinstance(proposer, DraftModel)
    for place in range(2):
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
        engine.submit(Request(f"r{place}", tuple(prompts()[place][:6]), params))
    unread = [CATCH_UP_TOKENS_A_STEP]
    while len(unread) < 2 or max(unread) > 2:  # until the draft is in step with both
        result = engine.step().result
        unread = [] if result is None else [row.unread_tokens for row in result.view.rows]
    engine.use_controller(FixedLength(0))
    for _ in range(plain_steps):
        engine.step()
    engine.use_controller(FixedLength(2))
    before = proposer.runner.passes
    result = engine.step().result
    assert result is not None
    unread = [row.unread_tokens for row in result.view.rows]
    assert max(unread) >= plain_steps
    assert proposer.runner.passes - before == 2 + catch_up_cost(unread)[1]
    assert catch_up_cost(unread)[1] == (plain_steps > READ_WITH_DRAFTING)
