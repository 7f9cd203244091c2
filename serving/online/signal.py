"""The target's best tokens and the draft's opinion of its own, compressed on the device and read in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.recording import TopSignal
from distillspec.serving.transfer import to_device, to_host
from distillspec.serving.tree import TokenTree


class Drafted(NamedTuple):
    """What was drafted where a token was emitted."""

    outcome: int
    token: int = -1
    row: int | None = None  # of the tree's `draft_probs`


class Recorded(NamedTuple):
    """r positions on the host: a `TopSignal`'s columns, and the draft's probability and entropy `[r]` float16."""

    ids: Tensor
    logprobs: Tensor
    tail: Tensor
    tail_ids: Tensor
    tail_logprobs: Tensor
    draft_probs: Tensor
    draft_entropies: Tensor


@dataclass(frozen=True)
class Packed:
    """What a step read from the device: `[n, bytes]` uint8, a row a position."""

    content: Tensor
    entries: int
    draws: int = 0


def read(pieces: Sequence[tuple[Packed, int, int]]) -> Recorded:
    """The positions `first` to `last` of many steps, one after another."""
    k, m = pieces[0][0].entries, pieces[0][0].draws
    content = torch.cat([packed.content[first:last] for packed, first, last in pieces])
    parts = content.split([4 * k, 2 * k, 4, 4 * m, 2 * m, 4], -1)
    kinds = (torch.int32, torch.float16, torch.float32, torch.int32, torch.float16, torch.float16)
    ids, logprobs, tail, tail_ids, tail_logprobs, opinion = map(_numbers, parts, kinds)
    return Recorded(ids, logprobs, tail[:, 0], tail_ids, tail_logprobs, opinion[:, 0], opinion[:, 1])


def _numbers(content: Tensor, kind: torch.dtype) -> Tensor:
    """Bytes `[r, b]` as numbers `[r, b / size]`; copied first, since a part of a row begins anywhere."""
    flat = content.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(kind).view(len(content), content.shape[1] // kind.itemsize)


def pack(signal: TopSignal, drafted: Sequence[Drafted], trees: Sequence[TokenTree]) -> Packed:
    """One copy to the host: the signal, and probability and entropy of what was drafted at each position."""
    opinion = _opinions(drafted, trees, signal.tail.device)
    parts = (signal.ids, signal.logprobs, signal.tail[:, None], signal.tail_ids, signal.tail_logprobs, opinion)
    content = to_host(torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1))
    return Packed(content, signal.ids.shape[1], signal.tail_ids.shape[1])


def _opinions(drafted: Sequence[Drafted], trees: Sequence[TokenTree], device: torch.device) -> Tensor:
    """`[n, 2]` float16: q(x) and the entropy of q; 1 and 0 for deterministic proposals, NaN without one."""
    known = [(1.0, 0.0) if d.token >= 0 else (torch.nan, torch.nan) for d in drafted]
    opinions = to_device(known, device, torch.float16)
    at = [i for i, d in enumerate(drafted) if d.row is not None and d.token >= 0]
    if at:
        probs = [trees[i].draft_probs[drafted[i].row] for i in at]  # type: ignore[index]
        q = torch.stack(probs).float()
        tokens = to_device([drafted[i].token for i in at], device)
        kept = trees[at[0]].kept_ids
        columns = tokens if kept is None else torch.searchsorted(kept, tokens)
        of_token = q.gather(-1, columns[:, None])[:, 0]
        opinions[to_device(at, device)] = torch.stack([of_token, torch.special.entr(q).sum(-1)], -1).to(opinions)
    return opinions
