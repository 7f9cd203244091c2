"""A look at recorded signals: they must be what the target says of the same text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.data.collect import SCORED_ROWS, response_logits
from distillspec.models.language_model import LanguageModel
from distillspec.signals import TeacherSignal
from distillspec.types import Sample

CHECKED = 6  # samples
FAR = 0.2  # nats. bfloat16 is .04 off float32. A text that was read at wrong places is .4 off and more


def strange_signals(samples: Sequence[Sample], target: LanguageModel) -> str | None:
    """Return a line if recorded log-probabilities are not those of a pass over the text, None if they are.

    The first samples with compressed signals are looked at. Drafts would learn another distribution unnoticed: their
    acceptance on text of the same fault is as high as on sound text.
    """
    checked = [sample for sample in samples if isinstance(sample.signal, TeacherSignal) and len(sample.signal)]
    if not checked:
        return None
    off = float(torch.cat([_errors(sample, target) for sample in checked[:CHECKED]]).median())
    if off <= FAR:
        return None
    return f"recorded log-probabilities are {off:.2f} nats off what {target.name} says of the same text"


@torch.no_grad()
def _errors(sample: Sample, target: LanguageModel) -> Tensor:
    """Return the distance of each recorded log-probability from the target's, `[T · K]`."""
    assert isinstance(sample.signal, TeacherSignal)
    recorded = sample.signal.ids.long().split(SCORED_ROWS)
    parts = zip(response_logits(sample, target), recorded, strict=True)
    told = [target.full_width(logits).log_softmax(-1).cpu().gather(1, ids) for logits, ids in parts]
    return (torch.cat(told) - sample.signal.logprobs.float()).abs().flatten()
