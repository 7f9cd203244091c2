"""Selected tokens: the same however the target is recorded, whatever ids draft and reference keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig, LossConfig, TrainConfig
from distillspec.data.packing import collate
from distillspec.models import LanguageModel, initialise_draft
from distillspec.signals import HiddenSignal
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule, loss_hidden
from distillspec.training.token_weights import shared_by_sequence, token_weights
from distillspec.types import Sample, TokenBatch

from .runs import metrics

KEPT = torch.arange(3, 203, 2)
OTHERS = {"as many others": torch.arange(4, 204, 2), "more": torch.arange(150), "all": None}


@torch.no_grad()
def recorded(batch: TokenBatch, target: LanguageModel) -> TokenBatch:
    """The batch with the target's final states in full precision, so that nothing but the teacher differs."""
    hidden = loss_hidden(target, batch)
    return replace(batch, signal=HiddenSignal(hidden, torch.logsumexp(target.head.logits(hidden), -1)))


@pytest.mark.parametrize("kept", OTHERS.values(), ids=OTHERS.keys())
def test_a_reference_with_other_ids_selects_alike_by_recorded_states_and_by_a_live_target(
    target: LanguageModel, samples: list[Sample], kept: Tensor | None
) -> None:
    reference = initialise_draft(DraftConfig(keep=[0, 1, 3]), target, kept_ids=kept)
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target, kept_ids=KEPT)
    module = DistillModule(draft, LossConfig(select_fraction=0.5, reference="given"))
    bare = [replace(sample, signal=None) for sample in samples]
    live = SampleFeed(bare, TrainConfig(max_steps=1, batch_tokens=512, row_tokens=512), 2, seed=0).take()
    found = [
        token_weights(module, module, batch, module.teacher(batch, target), target, reference)
        for batch in (live, recorded(live, target))
    ]
    assert 0 < float(found[0].sum()) < live.response_tokens
    assert torch.equal(found[0], found[1])


def test_answers_count_alike_by_sequence() -> None:
    texts = [Sample(f"s{i}", "d", (1, 3), tuple(range(20, 20 + n))) for i, n in enumerate((9, 4, 5))]
    batch = collate([texts[:1], texts[1:]], 16, 0)
    weights = shared_by_sequence(batch)
    assert [float(part.sum()) for part in weights.split([9, 4, 5])] == pytest.approx([6.0] * 3)
    assert float(weights.mean()) == pytest.approx(1)


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_the_loss_is_a_mean_over_tokens_or_over_answers(make_trainer: Any, samples: list[Sample], mean: str) -> None:
    cut = [replace(samples[0], response_ids=samples[0].response_ids[:2], signal=None), replace(samples[1], signal=None)]
    trainer = make_trainer(loss=LossConfig(name="ce"), samples_=cut, train={"max_steps": 1, "mean": mean})
    trainer.run()
    (logged,) = [line["train/loss"] for line in metrics(trainer.folder) if "train/loss" in line]
    draft = initialise_draft(DraftConfig(keep=[0, 3]), trainer.target)
    lost = [_cross_entropy(draft, sample) for sample in cut]
    means = {"token": torch.cat(lost).mean(), "sequence": torch.stack([own.mean() for own in lost]).mean()}
    assert logged == pytest.approx(float(means[mean]), rel=1e-4)
    assert abs(float(means["token"] - means["sequence"])) > 1e-3


@torch.no_grad()
def _cross_entropy(draft: LanguageModel, sample: Sample) -> Tensor:
    ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
    logits = draft.logits(ids[None])[0, len(sample.prompt_ids) - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits, ids[len(sample.prompt_ids) :], reduction="none")
