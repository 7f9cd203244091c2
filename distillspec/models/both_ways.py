"""Training and evaluation of blocks whose masks see each other in both directions, as serving runs them (DFlash).

All masks of a block are read in one pass, however many of its positions somebody asks for: what one position sees is
what it sees in serving. They see the text up to the block's newest token, which sees no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from distillspec.models.language_model import LanguageModel


class Keys(NamedTuple):
    """Keys of text that a cache holds, in its order."""

    column: Tensor  # [B, n] int64, the token's place in the row, or where no token sees it
    sequence: Tensor  # [B, n] int64, the number of its packed sequence


def anchors_of(position_ids: Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the newest token of the block that gives each wanted one, `[n_k]` int64 at position k.

    Args:
        position_ids: `[B, L]`, packed sequences. A block begins at its sequence's first token at the earliest.
        wanted: `[n_k]` int64 of the flattened grid `[B · L]`: tokens before the drafted ones.
    """
    flat_positions = position_ids.flatten()
    return [torch.sub(tokens, flat_positions[tokens].clamp(max=position)) for position, tokens in enumerate(wanted)]


def masks_behind(
    draft: LanguageModel, cache: Cache, text: Keys, sequence: Tensor, position_ids: Tensor, anchors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the last states `[n_k, D]` of mask k of the blocks behind `anchors[k]`, for k = 1 and on.

    Args:
        cache: keys and values of the text, which the pass adds its own to.
        text: what the cache holds.
        sequence, position_ids: `[B, L]`.
        anchors: `anchors_of`, those of position 0 among them.
    """
    width, count = position_ids.shape[1], int(draft.most_positions or 1) - 1
    begins = torch.zeros(position_ids.numel(), dtype=torch.bool, device=position_ids.device)
    for block_anchors in anchors[1:]:
        begins[block_anchors] = True
    blocks = begins.view(position_ids.shape)
    most = max(int(blocks.sum(-1).max()), 1)  # at least one a row: parallel wrappers count passes
    order = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    column = order[:, :most]
    steps = torch.arange(1, count + 1, device=column.device)
    mask_positions = (position_ids.gather(1, column)[..., None] + steps).flatten(1)
    ids = (-steps).expand(len(column), most, -1).flatten(1)
    mask = _mask(column, sequence.gather(1, column), text, count, draft.dtype)
    last = draft.last_states(ids, mask_positions, past_key_values=cache, use_cache=True, attention_mask=mask)
    block_index = order.argsort(dim=-1).flatten()
    states = []
    for position, block_anchors in enumerate(anchors[1:], start=1):
        mask_rows = (block_anchors // width) * most * count + block_index[block_anchors] * count + position - 1
        states.append(last.flatten(0, 1).index_select(0, mask_rows))
    return states


def _mask(column: Tensor, whose: Tensor, text: Keys, count: int, dtype: torch.dtype) -> Tensor:
    """Return the term `[B, 1, A · count, keys]` added to the scores of `count` masks behind each of `column [B, A]`."""
    seen = (text.column[:, None] <= column[..., None]) & (text.sequence[:, None] == whose[..., None])
    block = torch.arange(column.shape[1], device=column.device).repeat_interleave(count)
    of_block = (block[:, None] == block).expand(len(column), -1, -1)
    seen = torch.cat([seen.repeat_interleave(count, 1), of_block], -1)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
