"""How many sequences fit side by side in the memory that is free now."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from distillspec.models.language_model import LanguageModel, attention_heads

SHARE = 0.5  # of the free memory; the rest is for activations and everything else


def slots_that_fit(models: list[LanguageModel], wanted: int, max_len: int) -> int:
    """At most `wanted` slots of `max_len` tokens, and no more than half the free memory holds; at least one."""
    free = free_bytes(models[0].device)
    needed = sum(kv_bytes_per_token(model) for model in models) * max_len
    return wanted if free is None else max(1, min(wanted, int(SHARE * free // max(1, needed))))


def kv_bytes_per_token(model: LanguageModel) -> int:
    """Keys and values of one token over all layers."""
    layers = model.model.config.get_text_config().num_hidden_layers
    heads = attention_heads(model)
    return 2 * layers * heads.kv * heads.dim * torch.finfo(model.dtype).bits // 8


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had on the device now; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = [bytes_ for bytes_ in (_free_here(), _free_in_cgroup()) if bytes_ is not None]
    return min(known, default=None)


def _free_here() -> int | None:
    """What the machine has left."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _free_in_cgroup(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container has left of its limit; files that are merely cached count as free."""
    try:
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / "memory.max").read_text()) - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):  # no such files, or "max"
        return None


def return_freed_memory() -> None:
    """Have the C library give back what was freed.

    glibc keeps blocks of up to 32 MB for itself once such were freed: packed weights of model after model added up to
    gigabytes that nobody used.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextmanager
def moved_off_device(model: LanguageModel) -> Iterator[None]:
    """Keep the model's weights in main memory inside the block, and leave its device's memory to other processes."""
    device = model.device
    model.model.to("cpu")
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # torch keeps freed blocks for itself, and nobody else can have them
    try:
        yield
    finally:
        model.model.to(device)
