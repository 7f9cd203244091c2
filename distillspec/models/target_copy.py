"""A copy of the target that trains, and the model that it becomes in the target's precision."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from distillspec.files import write_folder
from distillspec.models.half_weights import fits_half, rounded_to_half
from distillspec.models.language_model import LanguageModel, fingerprint


class TargetCopy:
    """The target's layers train in float32. Embeddings, final norm and head stay, for drafts share them.

    Attributes:
        trained: the copy that trains.
        served: the same in the target's precision, as of the last `refresh`. Weights of a float32 target that 16 bits
            hold, as published ones do, are rounded to float16: others are served at a quarter of the speed on CPUs.

    Args:
        name: what drafts record as their target, the folder that `save` writes.
    """

    def __init__(self, target: LanguageModel, name: str) -> None:
        self.trained = replace(target, model=copy.deepcopy(target.model).float())
        self.trained.model.requires_grad_(False)
        self.trained.layers.requires_grad_(True)
        self.served = replace(target, model=copy.deepcopy(target.model), name=name)
        self._halves = [
            weight.ndim == 2 and weight.dtype == torch.float32 and fits_half(weight.detach(), exact=True)
            for weight in target.layers.parameters()
        ]

    @torch.no_grad()
    def refresh(self) -> LanguageModel:
        """Return `served` with the current weights and their hash."""
        pairs = zip(self.served.layers.parameters(), self.trained.layers.parameters(), self._halves, strict=True)
        for served, trained, half in pairs:
            served.copy_(rounded_to_half(trained) if half else trained)
        self.served = self.served.with_identity(weights_hash=fingerprint(self.served.model))
        return self.served


def save_target(target: LanguageModel, folder: Path) -> None:
    """Write a model folder that `target.path=FOLDER` loads. It is complete before it is visible."""

    def write(temporary: Path) -> None:
        target.model.save_pretrained(temporary)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(temporary)

    write_folder(folder, write)
