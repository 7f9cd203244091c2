"""Values of rows of a step's logits: the target's distribution, or its own token.

Where device reads are free, values are computed for the rows that are asked for. Elsewhere they are computed for
all rows at once, and picked on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distillspec.sampling import best_ids, policy_probs
from distillspec.serving.base.transfer import rows_of, to_device, to_host
from distillspec.serving.decoding.noise import exponentials
from distillspec.types import SamplingPolicy

Values = Callable[[Tensor], Tensor]
Compute = Callable[[Sequence[int]], Tensor]


def values_at(compute: Compute, rows: Sequence[int], count: int, device: torch.device, reads_are_free: bool) -> Values:
    """Return a function from rows `[m]` int64 to their values `[m, …]`.

    Args:
        compute: returns the values of rows given on the host.
        rows: all rows that may be asked for, in ascending order.
        count: rows of the step's logits.
        reads_are_free: compute them when they are asked for, with a device read. Else all at once.
    """
    if reads_are_free:
        return lambda at: compute(to_host(at).tolist())
    table = compute(rows)
    if len(rows) < count:
        table = table.new_zeros(count, *table.shape[1:]).index_copy_(0, to_device(list(rows), device), table)
    return lambda at: table.index_select(0, at)


def row_probs(logits: Tensor, policies: Sequence[SamplingPolicy], reads_are_free: bool) -> Compute:
    """Return what computes the distributions `[m, V]` float32 of rows of `logits [N, V]`.

    Args:
        policies: of each row.
        reads_are_free: see `policy_probs`.
    """

    def compute(rows: Sequence[int]) -> Tensor:
        alike: dict[SamplingPolicy, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(policies[row], []).append(place)
        parts = [
            policy_probs(rows_of(logits, [rows[place] for place in places]), policy, reads_are_free=reads_are_free)
            for policy, places in alike.items()
        ]
        if len(parts) == 1:
            return parts[0]
        order = to_device([place for places in alike.values() for place in places], logits.device)
        return torch.empty(len(rows), logits.shape[-1], device=logits.device).index_copy_(0, order, torch.cat(parts))

    return compute


def seeded_ids(probs: Compute, keys: Tensor, hashed: Tensor) -> Compute:
    """Return what computes the tokens of seeded rows (`decoding.noise`).

    Args:
        probs: the rows' distributions.
        keys: `[N, 2]` int32 of all rows, on the host.
        hashed: `hashed_ids` of the vocabulary.
    """

    def compute(rows: Sequence[int]) -> Tensor:
        row_keys = to_device(keys[list(rows)], hashed.device)
        return best_ids(probs(rows).div_(exponentials(row_keys, hashed)))

    return compute
