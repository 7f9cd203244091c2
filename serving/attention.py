"""Which attention an engine uses over its slots: chosen once, by trying it on the engine's own device."""

from __future__ import annotations

import torch

from distillspec.errors import ConfigError
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, masked_attention

WORDS = {
    masked_attention: "masked scaled_dot_product_attention over the slots",
    ragged_attention: "a Triton kernel over each row's own keys",
}
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # others: a few of their own last digits
COARSE = 3e-2


def choose_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> tuple[Attend, str]:
    """The attention for `wanted` (auto | masked | triton), and why in words, for the log.

    `auto` takes the kernel on CUDA devices where it runs and agrees with masked attention on made-up rows.

    Raises:
        ConfigError: `wanted` is triton and it does not run, or gives something else.
    """
    if wanted == "masked" or (wanted == "auto" and device.type != "cuda"):
        return masked_attention, WORDS[masked_attention]
    failure = _failure(device, dtype)
    if failure is None:
        return ragged_attention, WORDS[ragged_attention]
    if wanted == "triton":
        raise ConfigError(f"attention=triton does not work on {device} ({failure}); use attention=auto or masked")
    return masked_attention, f"{WORDS[masked_attention]} (no Triton kernel: {failure})"


def _failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernel here; None where it agrees with masked attention."""
    try:
        difference = _difference(device, dtype)
    except Exception as error:  # a compiler has many ways to fail
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None if difference <= TOLERANCE.get(dtype, COARSE) else f"it is off by {difference:.2g}"


@torch.inference_mode()
def _difference(device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference between the two on three rows of unlike lengths, with a sliding window."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(3, 200)
    starts, counts = torch.tensor([150, 3, 60]), torch.tensor([3, 2, 3])
    view = SlotView.append(cache, [0, 1, 2], starts.to(device), counts.to(device))
    shapes = ((3, 4, 3, 64), (3, 201, 2, 64), (3, 201, 2, 64))
    query, keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    found = ragged_attention(query, keys, values, view, window=100)
    wanted = masked_attention(query, keys, values, view, window=100)
    return float((found - wanted)[view.places < cache.max_len].abs().max())
