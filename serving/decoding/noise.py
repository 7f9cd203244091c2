"""Noise of seeded requests: Gumbel noise keyed by seed, answer and position.

The token at a position is argmax(log p + G), a draw from p (Gumbel-max). The draft proposes with the same G, so that it
agrees as often as its distribution does. The output depends on the target and the noise alone, not on drafts, lengths,
batches or preemption.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import torch
from torch import Tensor

from distillspec.serving.base.transfer import to_device

KEPT = 256  # positions: verification reuses the draft's noise


class NoiseBank:
    """Gumbel noise `[vocab]` float32 by key, with a cache of the latest."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._kept: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()

    def gumbel(self, seed: int, index: int, position: int) -> Tensor:
        """Return the noise `[vocab]` of answer `index` of a request with `seed`, at output token `position`."""
        key = (seed, index, position)
        if key not in self._kept:
            self._kept[key] = self._make(key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _make(self, key: tuple[int, int, int]) -> Tensor:
        # Drawn on the CPU, so that every device has the same numbers.
        digest = blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        exponential = torch.empty(self.vocab_size, dtype=torch.float32).exponential_(generator=generator)
        return to_device(exponential.log_().neg_(), self.device)
