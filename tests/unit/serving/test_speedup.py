"""Decoding by the engine, and costs of steps by its own passes."""

from __future__ import annotations

import pytest

from distillspec.config import DraftConfig
from distillspec.evaluation.measured import Decoding
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving.speedup import engine_costs, engine_decoders
from distillspec.serving.timed_passes import TimedPasses, Work
from distillspec.types import SamplingPolicy

from ..models.state_drafts import state_draft

PASS_S = {"verification": 10.0, "drafting": 1.0}  # and a tenth of it for each token


@pytest.mark.parametrize(("kind", "steps"), [("eagle", 4), ("medusa", 4), ("block", 4), ("tokens", 4)])
def test_costs_are_those_of_timed_passes(
    kind: str, steps: int, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = initialise_draft(DraftConfig(layers=2), target) if kind == "tokens" else state_draft(kind, target)

    def charged(self: TimedPasses, work: Work) -> float:
        work.run()
        rows = work.point.rows if work.kind == "verification" else 1
        return PASS_S[work.kind] * (1 + (work.point.tokens - rows) / 10)

    monkeypatch.setattr(TimedPasses, "seconds", charged)
    found = engine_costs(draft, target, [1], steps)[1]
    assert found.c == pytest.approx(0.1)
    assert found.beta == pytest.approx((1.0, 1.1, 1.2, 1.3, 1.4))
    assert [found.steps(k) for k in range(1, steps + 1)] == pytest.approx([1.0, 1.1, 1.2, 1.3])


def test_every_batch_is_timed(target: LanguageModel) -> None:
    costs = engine_costs(initialise_draft(DraftConfig(layers=1), target), target, [1, 3], 2)
    assert [cost.batch for cost in costs.values()] == [1, 3]
    assert all(min(cost.draft_step_s, *cost.verify_s) > 0 for cost in costs.values())
    assert all(cost.steps(2) >= cost.steps(1) > 0 for cost in costs.values())


def test_a_prompt_is_decoded_plainly_with_a_fixed_length_and_as_served(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target)
    with engine_decoders(draft, target, Decoding(SamplingPolicy(temperature=0.0), 2, 12, 0, 1)) as ways:
        plain, fixed, served = (way([[5, 6, 7, 8]]) for way in ways if way is not None)
    assert plain.tokens == fixed.tokens == served.tokens == plain.steps
    assert fixed.steps <= plain.steps
    assert min(run.seconds for run in (plain, fixed, served)) > 0
    with engine_decoders(draft, target, Decoding(SamplingPolicy(temperature=0.0), 2, 4, 0, 1)) as again:
        assert again.plain([[5, 6, 7, 8]]).tokens == 4, "both models were given back"


def test_prompts_are_decoded_side_by_side(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(layers=1), target)
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    with engine_decoders(draft, target, Decoding(SamplingPolicy(temperature=0.0), 2, 6, 0, len(prompts))) as ways:
        runs = [way(prompts) for way in ways if way is not None]
    assert [run.tokens for run in runs] == [18] * 3
    assert runs[0].steps < 12, "one pass reads a token of each"
