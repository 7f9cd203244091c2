"""Proof of an export: the folder, loaded by plain transformers, gives the draft's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distillspec.errors import RunError
from distillspec.export.vocabulary import learnt_ids, stray_mass
from distillspec.models import LanguageModel
from distillspec.models.target import read_weights

TOLERANCE = 1e-4  # on logits in float32 (a wrong row or tensor is off by whole units)


@dataclass(frozen=True)
class Probe:
    """Ids `[B, L]` a batch, and the draft's logits `[N, n]` float32 there on the `n` ids it learnt."""

    batches: tuple[Tensor, ...]
    learnt: Tensor  # [n] int64
    logits: Tensor  # of the draft as it is
    rounded: Tensor  # of the draft with its weights rounded to the dtype of the export


def make_probe(draft: LanguageModel, batches: Sequence[Tensor], dtype: torch.dtype) -> Probe:
    """Run the draft on `batches` and keep its logits. Rounds its parameters to `dtype`, in place."""
    exact = rounded = _draft_logits(draft, batches)
    if dtype is not torch.float32:
        with torch.no_grad():
            for parameter in draft.model.parameters():  # buffers stay exact: loaders compute them anew
                parameter.copy_(parameter.to(dtype))
        rounded = _draft_logits(draft, batches)
    return Probe(tuple(batches), learnt_ids(draft), exact, rounded)


def prove(folder: Path, probe: Probe) -> dict[str, float]:
    """Load the folder, compare, and return the measured figures of `ExportResult` by name.

    Raises:
        RunError: logits differ by 1e-4 or more.
    """
    model = read_weights(folder, torch.float32)
    logits = model_logits(model.to(probe.batches[0].device).eval(), probe.batches)
    return full_agreement(logits, probe.rounded, probe.logits, probe.learnt)


def full_agreement(logits: Tensor, rounded: Tensor, exact: Tensor, learnt: Tensor) -> dict[str, float]:
    """Return what `agreement` does, for a folder that has rows of ids never learnt too.

    Args:
        logits: `[N, rows]` float32, of the folder.
        rounded: `[N, n]`, the draft's on the `n` ids it `learnt`, rounded to the dtype of the export.
        exact: the same of the draft as it is.

    Raises:
        RunError: logits of learnt ids differ by 1e-4 or more.
    """
    same = learnt[exact.argmax(-1)] == logits.argmax(-1)
    return {
        **agreement(logits[:, learnt], rounded, exact),
        "argmax_agreement": float(same.float().mean()),
        "stray_mass": stray_mass(logits, learnt),
    }


def agreement(logits: Tensor, rounded: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the measured figures of `ExportResult` by name, for a folder that has rows of learnt ids alone.

    Args:
        logits: `[N, n]` float32, of the folder.
        rounded: the same of the draft with its weights rounded to the dtype of the export.
        exact: the same of the draft as it is.

    Raises:
        RunError: `logits` and `rounded` differ by 1e-4 or more, or in shape.
    """
    error = float((logits - rounded).abs().max()) if logits.shape == rounded.shape else float("nan")
    if not error < TOLERANCE:  # NaN too
        raise RunError(f"the export does not give the draft's logits (off by {error:.2e}); nothing was written")
    return {
        "max_abs_error": error,
        "rounding_error": float((logits - exact).abs().max()),
        "argmax_agreement": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
        "stray_mass": 0.0,
    }


@torch.no_grad()
def model_logits(model: PreTrainedModel, batches: Sequence[Tensor]) -> Tensor:
    """Return logits at every position of the batches, `[N, rows]` float32 on the CPU."""
    return torch.cat([model(input_ids=ids).logits.flatten(0, 1).float().cpu() for ids in batches])


@torch.no_grad()
def _draft_logits(draft: LanguageModel, batches: Sequence[Tensor]) -> Tensor:
    return torch.cat([draft.logits(ids).flatten(0, 1).float().cpu() for ids in batches])
