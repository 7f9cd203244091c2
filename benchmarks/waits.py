"""Places where an engine's steps wait for their CUDA device."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base import transfer
from distillspec.serving.base.fixed import FixedLength

TOLD = "synchronizing CUDA operation"  # words of torch's warning
WARM_UP, STEPS = 5, 3


def hidden_waits(engine: Engine, batch: int, length: int) -> list[str]:
    """Return where steady steps of `batch` greedy rows wait for the device, but in `to_host`, their one read.

    Args:
        length: tokens that each row drafts.

    Returns:
        File and line of each. Nothing on other devices, which do not tell.
    """
    if engine.target.device.type != "cuda":
        return []
    engine.use_controller(FixedLength(length))
    for row in range(batch):
        engine.submit(Request(f"row-{row}", tuple(range(5, 69)), SamplingParams(temperature=0.0, ignore_eos=True)))
    for _ in range(WARM_UP):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(STEPS):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for row in range(batch):
        engine.abort(f"row-{row}")
    engine.step()
    waits = [warning for warning in caught if TOLD in str(warning.message) and warning.filename != transfer.__file__]
    return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]
