"""One optimizer step: its gradient, its limits, and what it does about NaN."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distillspec.config import DraftConfig, LossConfig
from distillspec.errors import RunError
from distillspec.losses import SignalTeacher
from distillspec.models import LanguageModel, initialise_draft
from distillspec.sampling import NonFiniteLogits
from distillspec.training.checkpoint import load_newest
from distillspec.training.step import WeightedBatch, take_step
from distillspec.training.trainer import Trainer

from .runs import gradients, metrics, weights


class Poison:
    """Makes the loss of chosen steps NaN, forward or backward, in place of a real numerical accident."""

    def __init__(self, trainer: Trainer, steps: set[int], where: str) -> None:
        self.trainer, self.steps, self.where = trainer, steps, where
        self.plain = trainer.strategy.module
        trainer.strategy.module = self  # type: ignore[assignment]

    def __call__(self, *args: Any) -> Any:
        if self.trainer.progress.step not in self.steps:
            return self.plain(*args)
        if self.where == "forward":
            bad = NonFiniteLogits("draft logits: NaN at position 3")
            with mock.patch("distillspec.training.module.chunked_loss", side_effect=bad):
                return self.plain(*args)
        result = self.plain(*args)
        return type(result)(**{**result.__dict__, "loss": result.loss * math.nan})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_bad_step_is_skipped_and_counted(make_trainer, tmp_path: Path, where: str) -> None:
    trainer = make_trainer(tmp_path)
    Poison(trainer, {1, 4}, where)
    seen: dict[int, torch.Tensor] = {}
    trainer.report = lambda progress, values: seen.setdefault(progress.step, weights(trainer)["lm_head.weight"].clone())
    result = trainer.run()
    assert result.bad_steps == 2
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(seen[4], seen[5])
    assert not torch.equal(seen[2], seen[3])
    assert bool(torch.isfinite(seen[6]).all())
    steps = {line["step"]: line for line in metrics(tmp_path) if "train/lr" in line}
    assert [steps[n]["train/bad_steps"] for n in range(1, 7)] == [0, 1, 1, 1, 2, 2]
    assert load_newest(tmp_path / "checkpoints")[0].bad_steps == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_bad_steps_in_a_row_end_the_run_with_one_line(make_trainer, where: str) -> None:
    trainer = make_trainer(train={"max_bad_steps": 3})
    Poison(trainer, {1, 2, 3}, where)
    with pytest.raises(
        RunError, match=r"3 steps in a row were not finite at step 3 .*lower train\.learning_rate"
    ) as failed:
        trainer.run()
    assert "\n" not in str(failed.value)


def test_weights_that_are_not_finite_end_the_run_with_one_line(make_trainer, target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[7] = math.nan
    trainer = make_trainer(draft=draft, train={"max_bad_steps": 2})
    with pytest.raises(RunError, match="2 steps in a row were not finite"):
        trainer.run()


def test_selection_with_weights_that_are_not_finite_is_a_bad_step_too(make_trainer, target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[7] = math.nan
    loss = LossConfig(select_fraction=0.5, reference="given")
    trainer = make_trainer(draft=draft, loss=loss, reference=draft, train={"max_bad_steps": 2})
    with pytest.raises(RunError, match="2 steps in a row were not finite"):
        trainer.run()


def test_micro_batches_add_up_to_one_large_batch(make_trainer, tmp_path: Path) -> None:
    """Two accumulated halves give the gradient of the whole, token-weighted."""
    parts = make_trainer(tmp_path / "parts", train={"accumulate": 2, "max_steps": 1, "eval_every": 1, "clip_norm": 1e9})
    feed = [parts.feed.take() for _ in range(2)]
    whole = make_trainer(tmp_path / "whole", train={"max_steps": 1, "eval_every": 1, "clip_norm": 1e9})
    norms = []
    slopes = []
    for trainer, batches in ((parts, feed), (whole, [joined(feed)])):
        result, found = gradients(trainer, batches)
        assert result.tokens == sum(batch.response_tokens for batch in feed)
        norms.append(result.grad_norm)
        slopes.append(found)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert slopes[0]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def joined(batches: list[Any]) -> Any:
    """Batches of equally wide rows as one."""
    width = max(b.input_ids.shape[1] for b in batches)
    rows, index, first = [], [], 0
    for b in batches:
        pad = width - b.input_ids.shape[1]
        rows.append(
            (
                torch.nn.functional.pad(b.input_ids, (0, pad), value=2),
                torch.cat([b.position_ids, torch.arange(pad).expand(len(b.input_ids), pad)], 1),
            )
        )
        row, column = b.loss_index // b.input_ids.shape[1], b.loss_index % b.input_ids.shape[1]
        index.append((row + first) * width + column)
        first += len(b.input_ids)
    signals = [b.signal for b in batches]
    signal = type(signals[0])(
        signals[0].kind, *(torch.cat([getattr(s, name) for s in signals]) for name in ("ids", "logprobs", "tail"))
    )
    return dataclasses.replace(
        batches[0],
        input_ids=torch.cat([r[0] for r in rows]),
        position_ids=torch.cat([r[1] for r in rows]),
        loss_index=torch.cat(index),
        labels=torch.cat([b.labels for b in batches]),
        sample_index=torch.cat([b.sample_index for b in batches]),
        from_draft=torch.cat([b.from_draft for b in batches]),
        signal=signal,
    )


def test_gradients_above_the_limit_are_cut_to_it(make_trainer) -> None:
    trainer = make_trainer(train={"clip_norm": 1e-3, "max_steps": 2})
    after: list[float] = []
    update = trainer.strategy.update

    def watch() -> None:
        gradients = [p.grad for p in trainer.module.parameters() if p.grad is not None]
        after.append(float(torch.nn.utils.get_total_norm(gradients)))
        update()

    with mock.patch.object(trainer.strategy, "update", watch):
        trainer.run()
    logged = [line["train/grad_norm"] for line in metrics(trainer.folder) if "train/grad_norm" in line]
    assert min(logged) > 0.01  # what is logged is the norm before
    assert after == pytest.approx([1e-3, 1e-3], rel=1e-3)


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_chunk_tokens_bound_the_positions_whose_logits_exist(make_trainer, chunk_tokens: int) -> None:
    trainer = make_trainer(loss=LossConfig(chunk_tokens=chunk_tokens))
    batch = trainer.feed.take()
    assert 5 < batch.response_tokens < 1000
    seen: list[int] = []

    class Counting(SignalTeacher):
        def chunk(self, start: int, stop: int) -> Any:
            seen.append(stop - start)
            return super().chunk(start, stop)

    assert batch.signal is not None
    ones = torch.ones(batch.response_tokens)
    weighted = WeightedBatch(batch, Counting(batch.signal), ones, counted=ones)
    take_step(trainer.strategy, trainer.module, [weighted], learning_rate=1e-3, clip_norm=1.0)
    assert max(seen) == min(chunk_tokens, batch.response_tokens)
    assert sum(seen) == batch.response_tokens


def test_the_loss_is_divided_by_what_counts_where_it_is_defined(make_trainer) -> None:
    trainer = make_trainer(loss=LossConfig(name="ce"))
    batch = trainer.feed.take()
    half = torch.full((batch.response_tokens,), 0.5)
    losses = []
    for counted in (half, 2 * half):
        weighted = trainer.weighted(batch)._replace(weights=half, counted=counted)
        with mock.patch.object(trainer.strategy, "update"):
            losses.append(
                take_step(trainer.strategy, trainer.module, [weighted], learning_rate=1e-3, clip_norm=1.0).loss
            )
        trainer.strategy.skip()
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-6)
    lacking = dataclasses.replace(batch, labels=batch.labels.masked_fill(torch.arange(batch.response_tokens) < 3, -1))
    known = batch.response_tokens - 3
    result, _ = gradients(trainer, [lacking])
    assert result.sums["valid_weight"] == known
    assert result.loss == pytest.approx(result.sums["loss"] / known, rel=1e-5)
