"""The target's final hidden states on held-out text, kept between evaluations of one run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.models.language_model import LanguageModel
from distillspec.types import Sample

Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class TargetStates:
    """Reads each sample with the target once; a few MB stand for most of an evaluation's time.

    The target must not change between uses: it is frozen wherever this is used.
    """

    target: LanguageModel
    _known: dict[Key, Tensor] = field(default_factory=dict)

    def hidden(self, sample: Sample) -> Tensor:
        """Final hidden states `[R, D]` that predict the sample's R response tokens."""
        key = (sample.prompt_ids, sample.response_ids)
        if key not in self._known:
            self._known[key] = response_hidden(self.target, sample)
        return self._known[key]


@torch.no_grad()
def response_hidden(model: LanguageModel, sample: Sample) -> Tensor:
    """Final hidden states `[R, D]` whose logits predict the response tokens, the first one included."""
    read = torch.tensor([[*sample.prompt_ids, *sample.response_ids[:-1]]], device=model.device)
    places = torch.arange(read.shape[1], device=model.device)[None]
    return model.hidden(read, places)[0, len(sample.prompt_ids) - 1 :].clone()
