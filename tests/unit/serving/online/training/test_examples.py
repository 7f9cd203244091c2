"""Weights of logged tokens, and the batches made of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from distillspec.config import AdaptConfig
from distillspec.models import LanguageModel
from distillspec.serving.online.log.records import ACCEPTED, BONUS, PLAIN, REJECTED
from distillspec.serving.online.training.examples import example_batches, training_example_of

from ..conftest import Answer
from .drafts import CONFIG


def test_positions_count_as_configured(answer: Answer) -> None:
    outcomes = torch.tensor([ACCEPTED, REJECTED, BONUS, PLAIN], dtype=torch.uint8)
    one = answer("a", tokens=4, outcomes=outcomes)
    weights = {
        kind: training_example_of(one, AdaptConfig(positions=kind, accepted_weight=0.25)).weights.tolist()
        for kind in ("all", "rejected", "weighted")
    }
    assert weights == {"all": [1, 1, 1, 1], "rejected": [0, 1, 0, 1], "weighted": [0.25, 1, 1, 1]}


def test_a_weight_holds_for_batches_of_one_tenant_alone(small_draft: LanguageModel, answer: Answer) -> None:
    """Long answers fill batches of their own."""
    config = replace(CONFIG, epochs=1, max_steps=50, batch_tokens=64, row_tokens=64, clip_norm=1e9)
    examples = [training_example_of(answer(f"r{i}", tokens=50), config, 0.1 if i < 4 else 1.0) for i in range(6)]
    mean = (4 * 0.1 + 2 * 1.0) / 6
    normalised = []
    for _, weights, counted in example_batches(examples, config, small_draft, 0):
        normalised.append(round(float(weights.sum() / counted.sum()), 4))
    assert sorted(normalised) == sorted([round(0.1 / mean, 4)] * 4 + [round(1 / mean, 4)] * 2)
    plain = [training_example_of(answer(f"r{i}", tokens=50), config) for i in range(6)]
    assert all(torch.equal(weights, counted) for _, weights, counted in example_batches(plain, config, small_draft, 0))


def test_an_answer_behind_a_long_prompt_is_learnt_whole(small_draft: LanguageModel, answer: Answer) -> None:
    config = replace(CONFIG, epochs=1, batch_tokens=64, row_tokens=64)
    long = training_example_of(answer("long", prompt_ids=tuple(range(5, 105)), tokens=40), config)
    short = training_example_of(answer("short", tokens=20), config)
    batches = list(example_batches([long, short], config, small_draft, 0))
    assert sum(len(weights) for _, weights, _ in batches) == 60
    assert max(batch.input_ids.shape[1] for batch, _, _ in batches) == 140
