"""Training examples made of logged answers, packed into weighted batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.config import AdaptConfig
from distillspec.data.packing import collate, plan_epoch
from distillspec.errors import RunError
from distillspec.models import LanguageModel
from distillspec.serving.online.log.records import ACCEPTED, PLAIN, REJECTED, LoggedAnswer
from distillspec.serving.online.training.branches import branches_of
from distillspec.serving.online.training.selection import Selection
from distillspec.training.state_store import StateStore
from distillspec.types import Sample, TokenBatch


@dataclass(frozen=True)
class TrainingExample:
    """A sample with the weight of each of its R response tokens."""

    sample: Sample
    weights: Tensor  # [R] float32
    scale: float = 1.0  # multiplies all of them: the tenant's weight
    is_text: bool = True  # False: it follows drafted tokens that were not accepted


class ExampleBatch(NamedTuple):
    """Packed examples on the draft's device."""

    batch: TokenBatch
    weights: Tensor  # [N] float32, multiply each position's loss
    counted: Tensor  # [N] float32, sum to what the batch's loss is divided by


def training_example_of(answer: LoggedAnswer, config: AdaptConfig, scale: float = 1.0) -> TrainingExample:
    """Weigh an answer's tokens by `adapt.positions`.

    `rejected` are OSD's positions: those where the draft was wrong. Tokens without a draft (length 0) count as
    rejected, so that a draft too poor to be used can still learn.
    """
    outcomes = answer.outcomes
    if config.positions in ("all", "verified"):
        weights = torch.ones(len(answer))
    elif config.positions == "rejected":
        weights = ((outcomes == REJECTED) | (outcomes == PLAIN)).float()
    else:
        weights = torch.where(outcomes == ACCEPTED, config.accepted_weight, 1.0)
    return TrainingExample(answer.sample(), weights, scale)


def examples_of(chosen: Selection, answers: Sequence[LoggedAnswer], config: AdaptConfig) -> list[TrainingExample]:
    """Return the examples of an update: the logged `answers` that it chose, and its offline samples.

    With `adapt.positions=verified` what follows drafted tokens that were not accepted comes too, where it is logged.

    Raises:
        RunError: there are no answers any more.
    """
    if not answers:
        raise RunError(
            "the chosen answers were deleted from the log, so nothing is learnt; the next update takes newer ones"
        )
    examples = [training_example_of(answer, config, chosen.weights[answer.tenant]) for answer in answers]
    if config.positions == "verified":
        branches = branches_of(answers, chosen.weights, seed=chosen.logged[-1].number)
        examples += [TrainingExample(*branch, is_text=False) for branch in branches]
    return examples + [TrainingExample(sample, torch.ones(len(sample.response_ids))) for sample in chosen.offline]


def _plans(examples: Sequence[TrainingExample], config: AdaptConfig, seed: int) -> list[list[list[int]]]:
    """Return the batches of all epochs, each a list of rows of indices into `examples`."""
    lengths = [len(example.sample) for example in examples]
    rows = max(1, config.batch_tokens // config.row_tokens)
    return [
        plan for epoch in range(config.epochs) for plan in plan_epoch(lengths, config.row_tokens, rows, seed, epoch)
    ]


def example_batches(
    examples: Sequence[TrainingExample],
    config: AdaptConfig,
    draft: LanguageModel,
    seed: int,
    states: StateStore | None = None,
) -> Iterator[ExampleBatch]:
    """Yield packed batches that hold any weight, with the target's `states` if the draft reads some.

    The loss is divided by the sum that a batch's weights would have at the update's mean scale. Divided by the sum of
    its own weights, a batch of a single tenant would count in full, however small that tenant's weight is.
    """
    whole = sum(float(example.weights.sum()) for example in examples)
    mean_scale = sum(example.scale * float(example.weights.sum()) for example in examples) / whole
    pad = None if draft.tokenizer is None else draft.tokenizer.pad_token_id
    for plan in _plans(examples, config, seed):
        rows = [[examples[i] for i in row] for row in plan]
        samples = [[example.sample for example in row] for row in rows]
        # A sample longer than a row has a longer row to itself: if it were cut, its end would never be learnt.
        longest = max(len(sample) for row in samples for sample in row)
        batch = collate(samples, max(config.row_tokens, longest), pad if pad is not None else 0)
        if states is not None:
            batch = replace(batch, states=states.rows(samples, batch.input_ids.shape[1]))
        chosen = [example for row in rows for example in row]
        weights = torch.cat([example.scale * example.weights for example in chosen])
        counted = mean_scale * torch.cat([example.weights for example in chosen])
        if float(counted.sum()) > 0:
            yield ExampleBatch(batch.to(draft.device), weights.to(draft.device), counted.to(draft.device))
