"""Number format of a run's forward and backward passes on this machine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from omegaconf import OmegaConf

from distillspec.config import TrainCommand
from distillspec.models.numerics import resolve_device, resolve_dtype
from distillspec.models.product_trial import seconds

log = logging.getLogger(__name__)

AUTO = "auto"
TOKENS, WIDTH = 512, 1024  # of the products that are tried
ROUNDS = 7
WORTH = 0.9  # of float32's time: at more, bfloat16's conversions cost what it gains


def with_settled_dtype(config: TrainCommand, folder: Path) -> TrainCommand:
    """Return the config with the number format that `train.dtype=auto` means here. A resumed run keeps its own.

    Args:
        folder: the run's, whose `config.yaml` may have it.
    """
    if config.train.dtype != AUTO:
        return config
    dtype = _kept(folder / "config.yaml") or _fastest(resolve_device(config.target.device))
    return replace(config, train=replace(config.train, dtype=dtype))


def _kept(file: Path) -> str | None:
    """Return the format that a run was begun with, None for a new run."""
    if not file.is_file():
        return None
    dtype = str(OmegaConf.load(file).train.dtype)
    return None if dtype == AUTO else dtype


def _fastest(device: torch.device) -> str:
    """Return the name of the format that multiplies faster on `device`.

    CPUs with bfloat16 units may still multiply large float32 matrices faster: a Xeon with AVX512-BF16 and without AMX
    takes half the time.
    """
    if resolve_dtype(AUTO, device) == torch.float32:
        return "float32"
    if device.type != "cpu":
        return "bfloat16"
    ratio = bfloat16_ratio()
    chosen = "bfloat16" if ratio < WORTH else "float32"
    log.info("training in %s: products in bfloat16 take %.2f times float32's time here", chosen, ratio)
    return chosen


def bfloat16_ratio() -> float:
    """Return how long a product in bfloat16 takes on this CPU over one in float32, the median of alternating rounds."""
    wide = torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, WIDTH)
    half = wide[0].bfloat16(), wide[1].bfloat16()
    ratios = [seconds(lambda: half[0] @ half[1]) / seconds(lambda: wide[0] @ wide[1]) for _ in range(ROUNDS)]
    return median(ratios)
