"""Draws from the tail, recorded with training data: training's α is then the true one, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.config import DataConfig, DraftConfig
from distillspec.data.collect import collection_key, sample_responses, score, signal_request
from distillspec.data.packing import collate
from distillspec.data.shards import ShardWriter, read_samples
from distillspec.errors import ConfigError
from distillspec.generation import SlotGenerator
from distillspec.losses import DenseTeacher, SignalTeacher, Teacher
from distillspec.losses.chunked import chunked_loss
from distillspec.losses.mix import LossMix
from distillspec.models import LanguageModel, initialise_draft
from distillspec.signals import SignalRequest
from distillspec.training.module import loss_hidden
from distillspec.types import Prompt, Sample, SamplingPolicy, TokenBatch

PLAIN = SamplingPolicy()
PROMPTS = [Prompt(f"p{i}", tuple(range(20 + i, 26 + 2 * i))) for i in range(9)]
WITH_DRAWS = SignalRequest("topk", 8, tail_draws=4)


def collected(
    target: LanguageModel, folder: Path, request: SignalRequest | None, prompts: list[Prompt] = PROMPTS, slots: int = 4
) -> list[Sample]:
    """Samples written by the slot generator, put on disk and read back, in the order of their prompts."""
    writer = ShardWriter(folder, {}, shard_sequences=4)
    sample_responses(
        prompts,
        SlotGenerator(target, slots=slots),
        writer,
        policy=PLAIN,
        stop_ids=(),
        max_new_tokens=12,
        signal=request,
        seed=3,
    )
    return sorted(read_samples(folder), key=lambda sample: int(sample.prompt_id[1:]))


def draws(samples: list[Sample]) -> list[list[list[int]]]:
    found = [s.signal.tail_ids for s in samples if s.signal is not None]
    return [ids.tolist() for ids in found if ids is not None]


def test_draws_depend_on_the_request_alone_and_change_no_token(target: LanguageModel, tmp_path: Path) -> None:
    plain = collected(target, tmp_path / "plain", None)
    few = collected(target, tmp_path / "few", WITH_DRAWS, slots=2)
    many = collected(target, tmp_path / "many", WITH_DRAWS, slots=9)
    alone = collected(target, tmp_path / "alone", WITH_DRAWS, prompts=PROMPTS[4:5])
    assert [s.response_ids for s in plain] == [s.response_ids for s in few] == [s.response_ids for s in many]
    assert draws(few) == draws(many)
    assert draws(alone) == draws(few)[4:5]
    assert all(s.signal is not None and s.signal.request == WITH_DRAWS for s in few)


def test_scored_text_has_the_draws_it_would_have_been_written_with(target: LanguageModel, tmp_path: Path) -> None:
    written = collected(target, tmp_path, WITH_DRAWS)
    scored = score([replace(s, signal=None) for s in written], target, WITH_DRAWS, seed=3)
    assert draws(scored) == draws(written)
    assert draws(score(written[5:6], target, WITH_DRAWS, seed=3)) == draws(written)[5:6]


def alphas(draft: LanguageModel, batch: TokenBatch, teacher: Teacher) -> float:
    hidden = loss_hidden(draft, batch)
    metrics = chunked_loss(hidden, draft.head, teacher, LossMix.parse({"jsd": 1.0})).metrics
    return float(metrics["alpha"] / metrics["weight"])


@torch.no_grad()
def test_recorded_acceptance_is_the_true_one_within_its_standard_error(target: LanguageModel, tmp_path: Path) -> None:
    prompts = [Prompt(f"p{i}", (1, 20 + i % 200, 30 + i % 150)) for i in range(100)]
    samples = collected(target, tmp_path, WITH_DRAWS, prompts, slots=50)
    draft = initialise_draft(DraftConfig(layers=1), target)
    batch = collate([[s] for s in samples], 32, 2)
    assert batch.signal is not None
    truth = alphas(draft, batch, DenseTeacher(loss_hidden(target, batch), target.head))
    estimate = alphas(draft, batch, SignalTeacher(batch.signal))
    bucket = replace(batch.signal, tail_ids=None, tail_logprobs=None)
    # α's draws are min(1, q/p) of the tail's mass: none is off by more than that mass, and a position has four.
    tail = batch.signal.tail
    error = float((tail.square().sum() / 4 / 4).sqrt() / len(tail))
    assert abs(estimate - truth) < 4 * error
    assert alphas(draft, batch, SignalTeacher(bucket)) - truth > 12 * error


def test_a_folder_without_draws_is_read_and_goes_on_without_any(target: LanguageModel, tmp_path: Path) -> None:
    (first, second), config = PROMPTS[:2], DataConfig(signal_entries=8)
    old = {k: v for k, v in collection_key(target, config, PLAIN, 0, "w").items() if k != "tail_draws"}
    writer = ShardWriter(tmp_path, old, shard_sequences=1)
    for sample in collected(target, tmp_path / "text", SignalRequest("topk", 8), [first, second]):
        writer.add(sample)
    writer.flush()
    signals = [s.signal for s in read_samples(tmp_path)]
    assert all(signal is not None and signal.tail_ids is None for signal in signals)
    with pytest.raises(ConfigError, match="holds samples of tail_draws=None, not 4"):
        ShardWriter(tmp_path, collection_key(target, config, PLAIN, 0, "w"), 1)
    without = replace(config, tail_draws=0)
    assert ShardWriter(tmp_path, collection_key(target, without, PLAIN, 0, "w"), 1).done_ids == {"p0", "p1"}


def test_draws_are_the_default() -> None:
    request = signal_request(DataConfig())
    assert request is not None
    assert request.draws == 4
    with pytest.raises(ConfigError, match=r"data\.tail_draws=-1 must be in 0\.\.64"):
        DataConfig(tail_draws=-1)
