"""Memory of a device: what is free, and the number of KV cache slots that fits into it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from distillspec.models.features import feature_bytes_per_token
from distillspec.models.language_model import LanguageModel, attention_heads

SHARE = 0.5  # of the free memory. The rest is for activations and everything else
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def slots_that_fit(
    models: Sequence[LanguageModel],
    most: int,
    max_len: int,
    budget: float | None = None,
    feature_ids: Sequence[int] = (),
) -> int:
    """Return the number of slots of `max_len` tokens that fit, from 0 to `most`.

    Args:
        models: each has a cache of all slots. The target comes first.
        most: the largest answer.
        max_len: tokens of a slot.
        budget: bytes for all caches. None: half of the device's free memory, without limit if that is unknown.
        feature_ids: hidden states of the target that are kept too.
    """
    budget = cache_budget(models[0].device) if budget is None else budget
    return most if budget is None else min(most, int(budget // slot_bytes(models, max_len, feature_ids)))


def slot_bytes(models: Sequence[LanguageModel], max_len: int, feature_ids: Sequence[int] = ()) -> int:
    """Return the bytes of one slot in the caches of all models, with the spare place that each slot has.

    The states `feature_ids` are those of the first model.
    """
    return (max_len + 1) * token_bytes(models, feature_ids)


def token_bytes(models: Sequence[LanguageModel], feature_ids: Sequence[int] = ()) -> int:
    """Return the bytes of one token in the caches of all models, with the states `feature_ids` of the first one."""
    return feature_bytes_per_token(models[0], feature_ids) + sum(kv_bytes_per_token(model) for model in models)


def cache_budget(device: torch.device) -> float | None:
    """Return the bytes that caches may take, half of the free memory, or None if that is unknown."""
    free = free_bytes(device)
    return None if free is None else SHARE * free


def kv_bytes_per_token(model: LanguageModel) -> int:
    """Return the bytes of keys and values of one token over all layers."""
    if not model.attends:
        return 0
    layers = model.model.config.get_text_config().num_hidden_layers
    heads = attention_heads(model)
    return 2 * layers * heads.kv * heads.dim * torch.finfo(model.dtype).bits // 8


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on the device now, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = [bytes_ for bytes_ in (_free_here(), _free_in_cgroup()) if bytes_ is not None]
    return min(known, default=None)


def _free_here() -> int | None:
    """Return the bytes that the machine has left, or None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) * 1024


def _free_in_cgroup(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that a container has left of its limit. Cached files count as free."""
    try:
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / "memory.max").read_text()) - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):  # no such files, or "max"
        return None


def keep_freed_memory() -> None:
    """Make the C library keep freed blocks of up to 32 MB, and up to 256 MB in all, instead of returning them at once.

    A step frees and takes rows of 49,152 probabilities over and over. Fresh pages for them took half of a verdict.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 32 << 20)
            mallopt(M_TRIM_THRESHOLD, 256 << 20)


def return_freed_memory() -> None:
    """Make the C library return freed memory to the system.

    glibc keeps blocks of up to 32 MB for itself once such were freed. The packed weights of model after model added up
    to gigabytes that nothing used.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def free_unused() -> None:
    """Return memory that nothing uses to the system and to other processes, on all devices."""
    gc.collect()
    torch.cuda.empty_cache()  # torch keeps freed blocks from other processes
    return_freed_memory()


@contextmanager
def moved_off_device(model: LanguageModel) -> Iterator[None]:
    """Keep the model's weights in main memory inside the block, to leave its device's memory to other processes."""
    device = model.device
    model.model.to("cpu")
    if device.type == "cuda":
        free_unused()
    try:
        yield
    finally:
        model.model.to(device)
