"""The target's best tokens and the draft's opinion of its own, compressed on the device and read in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.sampling import draw_unchecked
from distillspec.serving.transfer import to_device, to_host
from distillspec.serving.tree import TokenTree

TINY = torch.finfo(torch.float32).tiny
BLOCK = 64  # neighbouring ids whose best is found first


class Drafted(NamedTuple):
    """What was drafted where a token was emitted."""

    outcome: int
    token: int = -1
    row: int | None = None  # of the tree's `draft_probs`


class TopSignal(NamedTuple):
    """n positions: `ids [n, K]` int32, `logprobs [n, K]` float16 (nats, raw), `tail [n]` float32 probability; m draws
    from the tail, `tail_ids [n, m]` int32 (−1 where it has no mass), `tail_logprobs [n, m]` float16."""

    ids: Tensor
    logprobs: Tensor
    tail: Tensor
    tail_ids: Tensor
    tail_logprobs: Tensor


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


def top_signal(logits: Tensor, entries: int, uniforms: Tensor | None = None) -> TopSignal:
    """As `distillspec.recording.top_entries`, for `logits [n, V]` of any float dtype; faster for wide V.

    Args:
        uniforms: `[n, m]` in [0, 1), on the logits' device: so many tokens are drawn from what is not among the best.
    """
    k = min(entries, logits.shape[-1])
    values, ids = top_of_blocks(logits, k)
    total = torch.logsumexp(logits.float(), -1, keepdim=True)
    logprobs = (values.float() - total).to(torch.float16)
    tail = (1.0 - logprobs.float().exp().sum(-1)).clamp_min(0.0)
    drawn = draw_from_tail(logits, ids, uniforms)
    return TopSignal(ids.to(torch.int32), logprobs, tail, *drawn)


def draw_from_tail(logits: Tensor, best: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """m draws `[n, m]` int32 from what `best [n, K]` leaves, and their log-probabilities."""
    if uniforms is None:
        nothing = logits.new_empty(len(logits), 0)
        return nothing.to(torch.int32), nothing.to(torch.float16)
    probs = torch.softmax(logits.float(), -1).scatter_(-1, best, 0.0)
    ids = torch.stack([draw_unchecked(probs, column) for column in uniforms.T], -1)
    mass = probs.gather(-1, ids)
    return ids.masked_fill(mass == 0, -1).to(torch.int32), mass.clamp_min(TINY).log().to(torch.float16)


def top_of_blocks(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, best first.

    They stand in at most k blocks, those with the k largest maxima: one pass finds these, and only k blocks are sorted.
    """
    width = logits.shape[-1]
    whole = width // BLOCK * BLOCK
    if whole < 4 * k * BLOCK:
        best = logits.topk(k, -1)
        return best.values, best.indices
    blocks = logits[:, :whole].unflatten(-1, (-1, BLOCK))
    chosen = blocks.amax(-1).topk(k, -1, sorted=False).indices
    values = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    places = (chosen[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    if whole < width:
        rest = torch.arange(whole, width, device=logits.device).expand(len(logits), -1)
        values, places = torch.cat([values, logits[:, whole:]], -1), torch.cat([places, rest], -1)
    best = values.topk(k, -1)
    return best.values, places.gather(1, best.indices)


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
