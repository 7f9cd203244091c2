"""Signal of one step: the target's top tokens, the draft's probability and entropy, read from the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.recording import TopSignal
from distillspec.serving.base.transfer import to_device, to_host
from distillspec.serving.base.tree import DraftProbs


class LoggedDraft(NamedTuple):
    """Drafted token at the position of an emitted one."""

    outcome: int
    token: int = -1
    drawn_from: DraftProbs | None = None  # None: deterministic
    row: int = 0


class Recorded(NamedTuple):
    """Rows of r positions on the host: the columns of a `TopSignal`, and two of the draft."""

    ids: Tensor
    logprobs: Tensor
    tail: Tensor
    tail_ids: Tensor
    tail_logprobs: Tensor
    draft_probs: Tensor  # [r] float16
    draft_entropies: Tensor  # [r] float16, nats


@dataclass(frozen=True)
class Packed:
    """Bytes that a step read from the device: `[n, bytes]` uint8, a row a position."""

    content: Tensor
    entries: int
    draws: int = 0


def read(pieces: Sequence[tuple[Packed, int, int]]) -> Recorded:
    """Join the positions `first` to `last` of each step."""
    k, m = pieces[0][0].entries, pieces[0][0].draws
    content = torch.cat([packed.content[first:last] for packed, first, last in pieces])
    parts = content.split([4 * k, 2 * k, 4, 4 * m, 2 * m, 4], -1)
    kinds = (torch.int32, torch.float16, torch.float32, torch.int32, torch.float16, torch.float16)
    ids, logprobs, tail, tail_ids, tail_logprobs, figures = map(_numbers, parts, kinds)
    return Recorded(ids, logprobs, tail[:, 0], tail_ids, tail_logprobs, figures[:, 0], figures[:, 1])


def _numbers(content: Tensor, kind: torch.dtype) -> Tensor:
    """View bytes `[r, b]` as numbers `[r, b / size]`, on a copy, since parts of a row are not aligned."""
    flat = content.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(kind).view(len(content), content.shape[1] // kind.itemsize)


def pack(signal: TopSignal, drafted: Sequence[LoggedDraft]) -> Packed:
    """Copy to the host at once: the signal, and probability and entropy of the drafted token at each position."""
    figures = _draft_figures(drafted, signal.tail.device)
    parts = (signal.ids, signal.logprobs, signal.tail[:, None], signal.tail_ids, signal.tail_logprobs, figures)
    content = to_host(torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1))
    return Packed(content, signal.ids.shape[1], signal.tail_ids.shape[1])


def _draft_figures(drafted: Sequence[LoggedDraft], device: torch.device) -> Tensor:
    """Return `[n, 2]` float16: q(x) and the entropy of q. Deterministic proposals have 1 and 0, none has NaN."""
    known = [(1.0, 0.0) if d.token >= 0 else (torch.nan, torch.nan) for d in drafted]
    figures = to_device(known, device, torch.float16)
    tables = {id(d.drawn_from): d.drawn_from for d in drafted if d.drawn_from is not None and d.token >= 0}
    for table in tables.values():
        at = [i for i, d in enumerate(drafted) if d.drawn_from is table]
        q = table.probs.index_select(0, to_device([drafted[i].row for i in at], device)).float()
        tokens = to_device([drafted[i].token for i in at], device)
        columns = tokens if table.kept_ids is None else torch.searchsorted(table.kept_ids, tokens)
        of_token = q.gather(-1, columns[:, None])[:, 0]
        figures[to_device(at, device)] = torch.stack([of_token, torch.special.entr(q).sum(-1)], -1).to(figures)
    return figures
