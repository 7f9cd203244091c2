"""Attention over packed rows, one sequence at a time: for training on CPUs.

Transformers hides the sequences of a row from each other with a mask, so torch computes every pair of the row's tokens.
Here each sequence is attended to alone, and in float32: torch's flash attention goes backward in bfloat16 on CPUs at
less than half that speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

IMPLEMENTATION = "distillspec_packed"
REPLACED = "sdpa"  # the attention whose results these are

Counts = list[list[int]]  # by row: numbers of tokens, of each of its sequences in order, and last of no sequence


def counts_of(sequence: Tensor, there: Tensor | None = None, most: int | None = None) -> Counts:
    """Return the number of tokens of each sequence.

    Args:
        sequence: `[B, n]` int64, the number of the sequence that each token belongs to, from 1 on, ascending in a row.
        there: `[B, n]` bool, False for tokens of no sequence. They come last.
        most: sequences in a row. None: the highest number.
    """
    there = torch.ones_like(sequence, dtype=torch.bool) if there is None else there
    most = int(sequence.max()) if most is None else most
    return [
        [*torch.bincount(row[known], minlength=most + 1)[1:].tolist(), int((~known).sum())]
        for row, known in zip(sequence, there, strict=True)
    ]


def can_attend_by_sequence(model: PreTrainedModel) -> bool:
    """Return True if the model may attend by sequence: it is on a CPU and attends as this file does."""
    return model.config._attn_implementation == REPLACED and model.device.type == "cpu"


@contextmanager
def attending_by_sequence(model: PreTrainedModel, passes: Sequence[Counts] | None) -> Iterator[None]:
    """Let a model that `can_attend_by_sequence` attend by sequence in this block, in this thread.

    A first pass needs no attention mask. Later ones need theirs, as without this.

    Args:
        passes: tokens of the pass in the block, and before them those of earlier ones whose keys are cached. None: the
            model attends as it does.
    """
    if passes is None:
        yield
        return
    model.set_attn_implementation(IMPLEMENTATION)
    _passed.passes = passes
    try:
        yield
    finally:
        model.set_attn_implementation(REPLACED)
        del _passed.passes


def reading_by_sequence(model: PreTrainedModel, position_ids: Tensor) -> AbstractContextManager[None]:
    """Let a model that can attend by sequence do so in a pass over packed sequences, `position_ids [B, L]`."""
    passes = [counts_of((position_ids == 0).cumsum(-1))] if can_attend_by_sequence(model) else None
    return attending_by_sequence(model, passes)


def sequence_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, q, d]
    key: Tensor,  # [B, kv_heads, keys of all passes, d]
    value: Tensor,
    attention_mask: Tensor | None,  # [B or 1, 1, q, keys] float or bool
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in place of transformers' own function, which every layer calls. Returns `[B, q, heads, d]`."""
    passes: Sequence[Counts] = _passed.passes
    rows = []
    for row, (q, k, v) in enumerate(zip(query.split(1), key.split(1), value.split(1), strict=True)):
        sizes = [counts[row] for counts in passes]
        mask = None if attention_mask is None else attention_mask[row if len(attention_mask) > 1 else 0, 0]
        rows.append(_row(q, k, v, mask, sizes, scaling, sliding_window))
    return torch.cat(rows).to(query.dtype).transpose(1, 2), None


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sizes: Sequence[Sequence[int]],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return the attention `[1, heads, q, d]` of a row, zero for tokens of no sequence."""
    *queries, spare = query.split(list(sizes[-1]), 2)
    keys, values = _by_sequence(key, sizes, 2), _by_sequence(value, sizes, 2)
    masks: Sequence[Tensor | None] = [None] * len(queries)
    if mask is not None:
        masks = [
            sequence_mask.split(list(sizes[-1]))[index]
            for index, sequence_mask in enumerate(_by_sequence(mask, sizes, 1))
        ]
    outputs = [
        _attend(*inputs, scaling, window)
        for inputs in zip(queries, keys, values, masks, strict=True)
        if inputs[0].shape[2]
    ]
    if not outputs:
        return torch.zeros_like(spare)
    return torch.cat([*outputs, torch.zeros_like(spare, dtype=outputs[0].dtype)], 2)


def _by_sequence(values: Tensor, sizes: Sequence[Sequence[int]], dim: int) -> list[Tensor]:
    """Return the values of each sequence, from all passes, along `dim`."""
    passes = values.split([sum(counts) for counts in sizes], dim)
    parts = [pass_values.split(list(counts), dim)[:-1] for pass_values, counts in zip(passes, sizes, strict=True)]
    return [
        torch.cat(sequence_parts, dim) if len(sequence_parts) > 1 else sequence_parts[0]
        for sequence_parts in zip(*parts, strict=True)
    ]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention `[1, heads, q, d]` of one sequence, causal without a mask, at least float32."""
    count = query.shape[2]
    if mask is None and window is not None and window < count:
        indices = torch.arange(count)
        apart = indices[:, None] - indices
        mask = (apart >= 0) & (apart < window)
    precise = torch.promote_types(query.dtype, torch.float32)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(precise)
    query, key, value = (tensor.to(precise) for tensor in (query, key, value))
    grouped = key.shape[1] != query.shape[1]
    with torch.autocast("cpu", enabled=False):
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )


_passed = local()
# Without a mask function transformers builds no mask.
AttentionInterface.register(IMPLEMENTATION, sequence_attention)
