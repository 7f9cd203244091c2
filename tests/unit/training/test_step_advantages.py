"""TVD++ over a step: however its text is dealt out, the gradient is one and the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from distillspec.config import LossConfig
from distillspec.data.collect import with_writer_logprobs
from distillspec.data.packing import collate
from distillspec.models import LanguageModel
from distillspec.training.trainer import Trainer
from distillspec.types import Sample, SamplingPolicy, TokenBatch

from .conftest import MakeTrainer
from .runs import gradients

TVDPP = LossConfig(name="tvdpp")


def batch_of(samples: Sequence[Sample]) -> TokenBatch:
    return collate([samples], 256, 2)


def slopes(trainer: Trainer, batches: list[TokenBatch]) -> list[torch.Tensor]:
    return gradients(trainer, batches)[1]


def assert_alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert any(float(slope.abs().max()) > 1e-5 for slope in theirs)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-3)


def test_micro_batches_share_one_mean_reward(make_trainer: MakeTrainer, samples: list[Sample]) -> None:
    """Of unlike batches each would otherwise call its own average good."""
    trainer = make_trainer(loss=TVDPP, train={"clip_norm": 1e9})
    drawn = [replace(s, source="draft") for s in samples]
    parts = [batch_of(drawn[:2]), batch_of(drawn[2:])]
    assert_alike(slopes(trainer, parts), slopes(trainer, [batch_of(drawn)]))


def test_text_that_teaches_nothing_does_not_dilute_the_rest(make_trainer: MakeTrainer, samples: list[Sample]) -> None:
    trainer = make_trainer(loss=TVDPP, train={"clip_norm": 1e9})
    drawn = [replace(s, source="draft") for s in samples[:4]]
    assert_alike(slopes(trainer, [batch_of([*drawn, *samples[4:]])]), slopes(trainer, [batch_of(drawn)]))


def test_what_the_draft_wrote_knows_how_likely_it_was(
    make_trainer: MakeTrainer, samples: list[Sample], target: LanguageModel
) -> None:
    draft = make_trainer().draft
    drawn = [replace(samples[0], source="draft"), samples[1]]
    policy = SamplingPolicy(temperature=0.7)
    first, second = with_writer_logprobs(drawn, draft, policy, target)
    ids = torch.tensor([first.prompt_ids + first.response_ids])
    logprobs = torch.log_softmax(draft.logits(ids)[0, len(first.prompt_ids) - 1 : -1].detach() / 0.7, -1)
    expected = logprobs.gather(-1, torch.tensor(first.response_ids)[:, None])[:, 0]
    assert first.writer_logprobs is not None
    torch.testing.assert_close(first.writer_logprobs, expected, atol=1e-4, rtol=1e-4)
    assert second.writer_logprobs is None
    batch = batch_of([first, second])
    assert batch.writer_logprobs is not None
    assert torch.equal(batch.writer_logprobs[: len(expected)], first.writer_logprobs)
    assert bool(batch.writer_logprobs[len(expected) :].isnan().all())
