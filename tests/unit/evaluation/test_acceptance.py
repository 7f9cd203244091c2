"""The whole evaluation of a draft on the tiny pair."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import EvaluationConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.evaluation import StepCost, evaluate
from distillspec.evaluation.acceptance import deployed
from distillspec.evaluation.cost import COSTS
from distillspec.evaluation.measured import DECODERS, Decoders, Decoding, Run
from distillspec.evaluation.positions import measure_positions
from distillspec.models import LanguageModel, load_draft, load_target, save_draft
from distillspec.models.checkpoint import SERVED
from distillspec.types import Sample, SamplingPolicy

from ..models.state_drafts import state_draft

QUICK = EvaluationConfig(speculation_length=3, bootstrap_samples=50, measure_cost=False)
POLICY = SamplingPolicy()


def test_a_draft_that_is_the_target_is_perfect(target: LanguageModel, samples: list[Sample]) -> None:
    result = evaluate(target, target, samples, POLICY, QUICK)
    assert result.alpha.mean == pytest.approx(1, abs=1e-5)
    assert result.greedy_agreement.mean == 1
    assert result.ceiling.mean == 1
    unfinished = [sample for sample in samples if not sample.finished]
    tau = evaluate(target, target, unfinished, POLICY, QUICK).tau
    # The stop token's probability is all that is missing to γ + 1.
    assert [interval.mean for interval in tau] == pytest.approx([2, 3, 4], rel=0.02)


def test_alpha_is_the_mean_over_positions_and_splits_by_domain(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample]
) -> None:
    result = evaluate(draft, target, samples, POLICY, QUICK)
    alphas = [measure_positions(draft, target, sample, POLICY).alpha for sample in samples]
    assert result.alpha.mean == pytest.approx(float(torch.cat(alphas).mean()))
    assert result.positions == sum(map(len, alphas))
    even = torch.cat([alpha for alpha, s in zip(alphas, samples, strict=True) if s.domain == "even"])
    assert set(result.alpha_by_domain) == {"even", "odd"}
    assert result.alpha_by_domain["even"].mean == pytest.approx(float(even.mean()))
    assert result.alpha.low < result.alpha.mean < result.alpha.high


def test_the_json_has_the_agreed_shape(
    truncated_draft: LanguageModel, target: LanguageModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(DECODERS, "engine", raising=False)  # a test that ran a command has left it there
    config = EvaluationConfig(2, 20, cost_batches=[1, 2], measure_speedup=True, speedup_prompts=2, speedup_tokens=4)
    result = json.loads(
        json.dumps(evaluate(truncated_draft, target, samples[:3], POLICY, config).to_json(), allow_nan=False)
    )
    assert set(result) == {
        "draft", "policy", "prompts", "positions", "alpha", "alpha_by_domain", "greedy_agreement",
        "p_of_draft_argmax", "ceiling", "tau", "cost", "speedup", "measured", "measured_at", "cut",
        "kind", "alpha_by_position", "rank_acceptance",
    }  # fmt: skip
    assert result["policy"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert set(result["alpha"]) == set(result["tau"][1]) == {"mean", "low", "high"}
    assert result["ceiling"]["mean"] < 1
    assert set(result["cost"]) == set(result["speedup"]) == {"1", "2"}
    assert set(result["cost"]["1"]) == {
        "c",
        "beta",
        "target_step_s",
        "draft_step_s",
        "draft_steps",
        "plain_share",
        "measured",
    }
    assert result["cost"]["2"]["beta"][0] == 1
    assert len(result["cost"]["2"]["beta"]) == 3
    assert set(result["speedup"]["1"]) == {
        "predicted", "intervals", "best_gamma", "best_gamma_range", "call", "breaks_even", "verdict",
    }  # fmt: skip
    for mean, interval in zip(result["speedup"]["1"]["predicted"], result["speedup"]["1"]["intervals"], strict=True):
        assert interval["mean"] == mean
        assert interval["low"] < interval["high"]
    assert min(result["cost"]["1"]["beta"]) >= 1
    assert set(result["measured"]) == {
        "gamma",
        "plain_tokens_per_s",
        "speculative_tokens_per_s",
        "ratio",
        "tau",
        "prompts",
        "served_tokens_per_s",
        "served",
    }
    assert result["measured"]["prompts"] == 2
    assert result["measured"]["served"] is None  # the reference decoder is no server
    assert result["measured_at"] is None


def test_prompts_side_by_side_are_decoded_by_the_engine_at_the_length_for_their_number(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    @contextmanager
    def decoders(draft: LanguageModel, target: LanguageModel, how: Decoding) -> Iterator[Decoders]:
        made.append((how.speculation_length, how.batch))
        yield Decoders(lambda prompts: Run(1.0, len(prompts), 1), lambda prompts: Run(0.5, len(prompts), 1))

    def costs(*_: Any) -> dict[int, StepCost]:
        return {1: StepCost(1, 0.01, (1.0, 1.0, 1.0, 1.0)), 3: StepCost(3, 0.5, (1.0, 2.0, 4.0, 6.0))}

    monkeypatch.setitem(DECODERS, "engine", decoders)
    monkeypatch.setitem(COSTS, "engine", costs)
    config = EvaluationConfig(3, 20, measure_speedup=True, speedup_batches=[3, 2], speedup_prompts=4)
    result = evaluate(draft, target, samples, POLICY, config)
    assert made == [(3, 1), (1, 3), (3, 2)]
    assert result.measured_at is not None
    assert {batch: own.prompts for batch, own in result.measured_at.items()} == {3: 4, 2: 4}
    assert result.to_json()["measured_at"]["3"]["ratio"]["mean"] == pytest.approx(2.0)


def test_the_quick_variant_takes_the_first_prompts_and_no_time(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample]
) -> None:
    seen: list[tuple[int, int]] = []
    config = replace(QUICK, measure_cost=True)
    result = evaluate(draft, target, samples, POLICY, config, max_prompts=3, on_sample=lambda *at: seen.append(at))
    assert result.prompts == 3
    assert result.cost is result.speedup is result.measured is None
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_the_share_of_answers_that_the_limit_cut_is_told(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample]
) -> None:
    four = [replace(sample, finished=number == 0) for number, sample in enumerate(samples[:4])]
    assert evaluate(draft, target, four, POLICY, QUICK).cut == 0.75


def test_responses_of_one_prompt_are_one_unit(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample]
) -> None:
    """Two prompts with two responses each resample as two units, so that their interval stays honest."""
    renamed = [replace(sample, prompt_id=f"p{i % 2}") for i, sample in enumerate(samples[:4])]
    result = evaluate(draft, target, renamed, POLICY, QUICK)
    assert result.prompts == 2
    assert result.positions == sum(len(sample.response_ids) for sample in renamed)


def test_a_training_draft_is_judged_without_dropout_and_goes_on_training(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample]
) -> None:
    draft.model.train()
    try:
        with deployed(draft, target) as judged:
            assert not judged.model.training
        assert draft.model.training
    finally:
        draft.model.eval()


def test_a_float32_draft_is_judged_in_the_targets_format(draft: LanguageModel, samples: list[Sample]) -> None:
    target = load_target(TargetConfig(path="tiny", dtype="bfloat16", device="cpu"))
    with deployed(draft, target) as judged:
        assert judged.dtype == torch.bfloat16
        assert all(buffer.dtype == torch.float32 for buffer in judged.model.buffers())
    assert draft.dtype == torch.float32
    assert 0 < evaluate(draft, target, samples[:2], POLICY, QUICK).alpha.mean < 1


def test_16_bits_a_weight_hardly_move_acceptance(
    draft: LanguageModel, target: LanguageModel, samples: list[Sample], tmp_path: Path
) -> None:
    """Logits are sums of products with weights that are off by at most 2^-9 each, so α moves by about as much."""
    changed = replace(draft, model=copy.deepcopy(draft.model))
    with torch.no_grad():
        for parameter in changed.model.parameters():  # as training leaves them: no weight is a bfloat16 number
            parameter *= 1 + 0.01 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    save_draft(changed, tmp_path / "draft", target, dtype=SERVED)
    trained = evaluate(changed, target, samples, POLICY, QUICK).alpha.mean
    served = evaluate(load_draft(tmp_path / "draft", target), target, samples, POLICY, QUICK).alpha.mean
    assert served != trained
    assert served == pytest.approx(trained, rel=2**-8)


def test_nothing_to_judge_is_refused(draft: LanguageModel, target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="no held-out prompt has a response"):
        evaluate(draft, target, [Sample("p", "d", (5,), ())], POLICY, QUICK)


def test_heads_are_measured_by_rank(target: LanguageModel, draft: LanguageModel, samples: list[Sample]) -> None:
    heads = state_draft("medusa", target)
    found = evaluate(heads, target, samples, POLICY, QUICK).rank_acceptance
    measured = [
        measure_positions(heads, target, sample, POLICY, speculation_length=3).at(1).by_rank for sample in samples
    ]
    assert (len(found), len(found[0])) == (3, 10)
    assert found[1] == pytest.approx(torch.cat([each for each in measured if each is not None]).mean(0).tolist())
    assert evaluate(draft, target, samples[:2], POLICY, QUICK).rank_acceptance == ()
