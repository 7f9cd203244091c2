"""Positions at which a draft chose a token, and how probably it is accepted, to teach and to judge a `StopHead`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates, drafted_hidden
from distillspec.models.language_model import LanguageModel
from distillspec.models.stop_head import StopExamples, StopHead
from distillspec.types import Sample, SamplingPolicy

CALIBRATED = 10  # parts of [0, 1] in which predictions are compared with what they predict


@dataclass(frozen=True)
class StopQuality:
    """Quality of predictions of what is accepted, on positions that did not teach them.

    error: mean squared error of the prediction. `by_best`: of the draft's best probability in its place. `by_mean`: of
        the mean acceptance, which is the same at all positions.
    calibration: mean distance of prediction and acceptance over tenths of [0, 1], weighted by positions.
    """

    places: int
    mean: float
    error: float
    by_best: float
    by_mean: float
    calibration: float


@torch.no_grad()
def stop_examples(
    head: StopHead,
    draft: LanguageModel,
    states: TargetStates,
    samples: Sequence[Sample],
    policy: SamplingPolicy,
    speculation_length: int,
    on_sample: Callable[[int], None],
) -> StopExamples:
    """Return the examples of all response tokens, as each of the first `speculation_length` drafted positions.

    Args:
        on_sample: called with the number of samples that are read.
    """
    examples: list[tuple[Tensor, Tensor, Tensor]] = []
    for done, sample in enumerate(samples, 1):
        positions = measure_positions(
            draft, states.target, sample, policy, states=states, speculation_length=speculation_length
        )
        for depth, hidden in enumerate(drafted_hidden(draft, sample, states, speculation_length)):
            logits = draft.head.logits(hidden)
            best = torch.softmax(logits.float(), -1).amax(-1)
            examples.append((head.inputs(hidden, logits).cpu(), best.cpu(), positions.at(depth).alpha.float()))
        states.forget()  # each sample is read once
        on_sample(done)
    return StopExamples(*(torch.cat(column) for column in zip(*examples, strict=True)))


@torch.no_grad()
def stop_quality(head: StopHead, examples: StopExamples) -> StopQuality:
    """Judge a trained head."""
    alpha = examples.alpha
    predicted = torch.sigmoid(head(examples.inputs))
    part = (predicted * CALIBRATED).long().clamp(max=CALIBRATED - 1)
    off = torch.zeros(CALIBRATED).index_add(0, part, predicted - alpha).abs().sum() / len(examples)
    return StopQuality(
        len(examples),
        float(alpha.mean()),
        float((predicted - alpha).square().mean()),
        float((examples.best - alpha).square().mean()),
        float(alpha.var(unbiased=False)),
        float(off),
    )
