"""Selected tokens: the same however the target is recorded, whatever ids draft and reference keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig, LossConfig, TrainConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.signals import HiddenSignal
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule, loss_hidden
from distillspec.training.token_weights import token_weights
from distillspec.types import Sample, TokenBatch

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
