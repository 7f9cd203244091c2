"""Signal of one step: the target's top tokens, the draft's probability and entropy, read from the device at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.native.signal_kernel import Position, signal_kernel_for
from distillspec.recording import TopSignal, top_signal
from distillspec.serving.base.transfer import rows_of, to_device, to_host
from distillspec.serving.base.tree import DraftProbs


class LoggedDraft(NamedTuple):
    """Drafted token at the position of an emitted one."""

    outcome: int
    token: int = -1
    drawn_from: DraftProbs | None = None  # None: deterministic
    row: int = 0

    @property
    def told(self) -> LoggedDraft:
        """The same without the distribution, which holds that of all rows of a step in memory."""
        return LoggedDraft(self.outcome, self.token)


class Recorded(NamedTuple):
    """Rows of r positions on the host: three columns of a `TopSignal`, two of the policy, two of the draft."""

    ids: Tensor
    logprobs: Tensor
    tail: Tensor
    policy_logprobs: Tensor  # [r] float16, as in `LoggedAnswer`
    policy_log_z: Tensor  # [r] float16
    draft_probs: Tensor  # [r] float16
    draft_entropies: Tensor  # [r] float16, nats


@dataclass(frozen=True)
class Packed:
    """Bytes that a step read from the device: `[n, bytes]` uint8, a row a position."""

    content: Tensor
    entries: int


def read(pieces: Sequence[tuple[Packed, int, int]]) -> Recorded:
    """Join the positions `first` to `last` of each step."""
    k = pieces[0][0].entries
    content = torch.cat([packed.content[first:last] for packed, first, last in pieces])
    parts = content.split([4 * k, 2 * k, 4, 8], -1)
    kinds = (torch.int32, torch.float16, torch.float32, torch.float16)
    ids, logprobs, tail, figures = map(_numbers, parts, kinds)
    return Recorded(ids, logprobs, tail[:, 0], *figures.unbind(-1))


def _numbers(content: Tensor, kind: torch.dtype) -> Tensor:
    """View bytes `[r, b]` as numbers `[r, b / size]`, on a copy, since parts of a row are not aligned."""
    flat = content.clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(kind).view(len(content), content.shape[1] // kind.itemsize)


def record(
    logits: Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    temperatures: Sequence[float | None],
    drafted: Sequence[LoggedDraft],
    entries: int,
) -> Packed:
    """Record n emitted tokens on the host: on CPUs in one call of C++, else in one read from the device.

    Args:
        logits: `[N, V]` raw.
        rows: of the logits, one a token.
        tokens: emitted.
        temperatures: of each token, None for text that judges no draft.
        drafted: at the same positions.
        entries: most probable tokens to keep.
    """
    count, kernel = min(entries, logits.shape[-1]), signal_kernel_for(logits)
    if kernel is not None and all(d.drawn_from is None or d.drawn_from.probs.dtype == torch.float32 for d in drafted):
        heat = [math.nan if temperature is None else temperature for temperature in temperatures]
        positions = [_position(*each) for each in zip(rows, tokens, heat, drafted, strict=True)]
        return Packed(kernel.record(logits, count, positions), count)
    chosen = rows_of(logits, rows)
    signal = top_signal(chosen, count)
    return pack(signal, policy_figures(chosen, signal, tokens, temperatures), drafted)


def _position(row: int, token: int, heat: float, draft: LoggedDraft) -> Position:
    table = draft.drawn_from
    if table is None or draft.token < 0:
        return Position(row, token, heat, draft.token)
    return Position(row, token, heat, draft.token, table.probs, draft.row, table.kept_ids)


def pack(signal: TopSignal, of_policy: Tensor, drafted: Sequence[LoggedDraft]) -> Packed:
    """Copy to the host at once: the signal, `policy_figures`, probability and entropy of each drafted token."""
    figures = torch.cat([of_policy, _draft_figures(drafted, signal.tail.device)], -1)
    parts = (signal.ids, signal.logprobs, signal.tail[:, None], figures)
    content = to_host(torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1))
    return Packed(content, signal.ids.shape[1])


def policy_figures(
    logits: Tensor, signal: TopSignal, tokens: Sequence[int], temperatures: Sequence[float | None]
) -> Tensor:
    """Return `policy_logprobs` and `policy_log_z` of emitted tokens, `[n, 2]` float16.

    Args:
        logits: `[n, V]` raw.
        signal: of these logits.
        tokens: emitted.
        temperatures: of each row, None for rows that judge no draft.
    """
    device = logits.device
    chosen = logits.gather(-1, torch.stack([to_device(tokens, device), signal.ids[:, 0].long()], 1)).float()
    total = chosen[:, 1] - signal.logprobs[:, 0].float()  # of exp(logits), in logs, without another pass over them
    logprobs, log_z = chosen[:, 0] - total, torch.zeros_like(total)
    others = [row for row, value in enumerate(temperatures) if value not in (None, 0.0, 1.0)]
    if others:
        rows = to_device(others, device)
        heat = to_device([float(temperatures[row] or 1.0) for row in others], device, torch.float32)
        softened = torch.logsumexp(logits.index_select(0, rows).float() / heat[:, None], -1) - total[rows] / heat
        log_z.index_copy_(0, rows, softened)
        logprobs.index_copy_(0, rows, logprobs[rows] / heat - softened)
    known = to_device([{None: torch.nan, 0.0: 0.0}.get(value, 1.0) for value in temperatures], device, torch.float32)
    logprobs = torch.where(known == 0, 0.0, logprobs)  # greedy: the token is certain
    return torch.stack([logprobs + 0 * known, log_z], -1).to(torch.float16)


def _draft_figures(drafted: Sequence[LoggedDraft], device: torch.device) -> Tensor:
    """Return `[n, 2]` float16: q(x) and the entropy of q. Deterministic proposals have 1 and 0, none has NaN."""
    known = [(1.0, 0.0) if d.token >= 0 else (torch.nan, torch.nan) for d in drafted]
    figures = to_device(known, device, torch.float16)
    tables = {id(d.drawn_from): d.drawn_from for d in drafted if d.drawn_from is not None and d.token >= 0}
    for table in tables.values():
        positions = [i for i, d in enumerate(drafted) if d.drawn_from is table]
        q = table.probs.index_select(0, to_device([drafted[i].row for i in positions], device)).float()
        tokens = to_device([drafted[i].token for i in positions], device)
        columns = tokens if table.kept_ids is None else torch.searchsorted(table.kept_ids, tokens)
        of_token = q.gather(-1, columns[:, None])[:, 0]
        figures[to_device(positions, device)] = torch.stack([of_token, torch.special.entr(q).sum(-1)], -1).to(figures)
    return figures
