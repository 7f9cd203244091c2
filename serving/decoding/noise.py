"""Noise of seeded requests, keyed by seed, answer, position and token id.

The token at a position is argmax(p(x) / E(x)), E independent exponentials: a draw from p. It is argmax(log p + G) with
Gumbel noise G = −log E (Gumbel-max). The draft proposes with the same E, so that it agrees as often as its distribution
does. The output depends on the target and the noise alone, not on drafts, lengths, batches or preemption.

E(x) is a hash of its key, computed where the logits are: nothing is drawn in order, uploaded or kept, and a draft's
columns get the noise of their ids alone. Integers of 31 bits are multiplied in int32, which wraps, and are masked. So
bits and uniforms are equal on every device. The logarithm may differ between devices in its last place.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

_MASK = 0x7FFFFFFF  # non-negative int32, so that right shifts bring in zeros
# Odd factors and shifts of "lowbias32" (Wellons, "Prospecting for hash functions", 2018), modulo 2^31.
_FACTORS = (0x7FEB352D, 0x046CA68B)
_SHIFTS = (16, 15, 16)
# Times 2^31 it is 1 − 2^-22, the largest uniform, so that no logarithm of 0 is taken.
_STEP = 2.0**-31 * (1 - 2.0**-22)


def noise_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """Return the key, two numbers below 2^31, of answer `index` of a request with `seed` at output token `position`."""
    digest = blake2b(f"{seed},{index},{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") & _MASK, int.from_bytes(digest[4:], "little") & _MASK


def key_tensor(keys: Iterable[tuple[int, int]]) -> Tensor:
    """Return keys `[N, 2]` int32 on the host."""
    return torch.tensor(list(keys), dtype=torch.int32).view(-1, 2)


def hashed_ids(ids: Tensor) -> Tensor:
    """Return token `ids [W]` int64 as numbers `[W]` int32 in [0, 2^31) without a pattern, all different."""
    return _mixed(ids.to(torch.int32))


def noise_bits(keys: Tensor, hashed: Tensor) -> Tensor:
    """Return uniform integers `[N, W]` int32 in [0, 2^31) for `keys [N, 2]` and `hashed_ids [W]`.

    The two halves of a key enter at different places: ids that collide under one key do not under another.
    """
    return _mixed(hashed ^ keys[:, :1], keys[:, 1:])


def exponentials(keys: Tensor, hashed: Tensor) -> Tensor:
    """Return exponential noise `[N, W]` float32, above 0 and finite, for `keys [N, 2]` and `hashed_ids [W]`.

    E = −log(1 − u), u on a grid of 2^-31. Small E decide, and there u and E have all digits of a float32.
    """
    uniforms = noise_bits(keys, hashed).float()
    return uniforms.add_(0.5).mul_(-_STEP).log1p_().neg_()


def _mixed(values: Tensor, halfway: Tensor | None = None) -> Tensor:
    """Hash `values` int32 in place, mixing in `halfway` after the first product."""
    shifted = torch.empty_like(values)
    for factor, shift in zip(_FACTORS, _SHIFTS[:2], strict=True):
        values.bitwise_xor_(torch.bitwise_right_shift(values, shift, out=shifted)).mul_(factor)
        if halfway is not None:
            values.bitwise_xor_(halfway)
            halfway = None
        values.bitwise_and_(_MASK)
    return values.bitwise_xor_(torch.bitwise_right_shift(values, _SHIFTS[2], out=shifted))
