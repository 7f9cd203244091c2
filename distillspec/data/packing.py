"""Packing of samples into rows: block-diagonal, so that no token is spent on padding and no sample sees another."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from distillspec.signals import HiddenSignal, Signal, TeacherSignal
from distillspec.types import Sample, TokenBatch

WINDOW_ROWS = 16  # rows packed together before shuffling: more give fuller rows, fewer a freer order


def plan_epoch(lengths: Sequence[int], row_tokens: int, rows: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """Return the epoch's batches, each at most `rows` lists of sample numbers that fit `row_tokens` together.

    The plan is a pure function of the arguments, so a resumed run sees the same batches. A sample longer than a row
    gets a row of its own.
    """
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    packed: list[list[int]] = []
    window: list[int] = []
    budget = WINDOW_ROWS * rows * row_tokens
    used = 0
    for sample in order:
        window.append(sample)
        used += min(lengths[sample], row_tokens)
        if used >= budget:
            packed.extend(_first_fit(window, lengths, row_tokens))
            window, used = [], 0
    packed.extend(_first_fit(window, lengths, row_tokens))
    rng.shuffle(packed)
    return [packed[i : i + rows] for i in range(0, len(packed), rows)]


def _first_fit(samples: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack by first-fit decreasing: longest samples first, each into the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: -lengths[s]):
        need = min(lengths[sample], row_tokens)
        row = next((i for i, free in enumerate(room) if free >= need), None)
        if row is None:
            rows.append([])
            room.append(row_tokens)
            row = len(rows) - 1
        rows[row].append(sample)
        room[row] -= need
    return rows


def collate(rows: Sequence[Sequence[Sample]], row_tokens: int, pad_id: int) -> TokenBatch:
    """Lay samples out in `[B, L]`, with L the fullest row. `TokenBatch` defines the loss positions.

    Padding at a row's end counts as a sequence of its own without loss positions. The signal is kept only if every
    sample has one of the same kind and size.
    """
    cut = [[cut_to_fit(sample, row_tokens) for sample in row] for row in rows]
    width = max(sum(len(sample) for sample in row) for row in cut)
    input_ids = torch.full((len(cut), width), pad_id, dtype=torch.int64)
    position_ids = torch.zeros((len(cut), width), dtype=torch.int64)
    index: list[torch.Tensor] = []
    labels: list[int] = []
    for r, row in enumerate(cut):
        start = 0
        for sample in row:
            ids = sample.prompt_ids + sample.response_ids
            input_ids[r, start : start + len(ids)] = torch.tensor(ids)
            position_ids[r, start : start + len(ids)] = torch.arange(len(ids))
            first = r * width + start + len(sample.prompt_ids) - 1
            index.append(torch.arange(first, first + len(sample.response_ids)))
            labels.extend(sample.response_ids)
            start += len(ids)
        position_ids[r, start:] = torch.arange(width - start)
    samples = [sample for row in cut for sample in row]
    counts = torch.tensor([len(s.response_ids) for s in samples])
    return TokenBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        loss_index=torch.cat(index),
        labels=torch.tensor(labels, dtype=torch.int64),
        sample_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        domains=tuple(s.domain for s in samples),
        from_draft=torch.repeat_interleave(torch.tensor([s.source == "draft" for s in samples]), counts),
        signal=_joined([s.signal for s in samples]),
        writer_logprobs=joined_writer_logprobs(samples),
    )


def cut_to_fit(sample: Sample, limit: int) -> Sample:
    """Return the sample with its response shortened to fit (at least one response token is kept)."""
    if len(sample) <= limit:
        return sample
    keep = max(1, limit - len(sample.prompt_ids))
    prompt = sample.prompt_ids[-(limit - keep) :]
    signal = None if sample.signal is None else sample.signal.rows(0, keep)
    return Sample(
        sample.prompt_id,
        sample.domain,
        prompt,
        sample.response_ids[:keep],
        signal,
        sample.source,
        finished=False,
        writer_logprobs=None if sample.writer_logprobs is None else sample.writer_logprobs[:keep],
    )


def _joined(signals: Sequence[Signal | None]) -> Signal | None:
    hidden = [signal for signal in signals if isinstance(signal, HiddenSignal)]
    if len(hidden) == len(signals):
        return HiddenSignal(torch.cat([s.hidden for s in hidden]), torch.cat([s.log_z for s in hidden]))
    known = [signal for signal in signals if isinstance(signal, TeacherSignal)]
    if len(known) != len(signals) or len({(s.kind, s.ids.shape[1]) for s in known}) != 1:
        return None
    return TeacherSignal(
        known[0].kind,
        torch.cat([s.ids for s in known]),
        torch.cat([s.logprobs for s in known]).float(),
        torch.cat([s.tail for s in known]).float(),
        *joined_draws(known),
    )


def joined_writer_logprobs(samples: Sequence[Sample]) -> Tensor | None:
    """Return `[responses' tokens]` float32, NaN for samples that lack them, or None if all do."""
    known = [s.writer_logprobs for s in samples]
    if all(logprobs is None for logprobs in known):
        return None
    unknown = (torch.full((len(s.response_ids),), torch.nan) for s in samples)
    return torch.cat(
        [gap if logprobs is None else logprobs.float() for logprobs, gap in zip(known, unknown, strict=True)]
    )


def joined_draws(signals: Sequence[TeacherSignal]) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the tails' draws side by side, padded with −1 and 0 for signals that have fewer than others."""
    most = max((0 if s.tail_ids is None else s.tail_ids.shape[1] for s in signals), default=0)
    if most == 0:
        return None, None
    ids, logprobs = [], []
    for signal in signals:
        draws = (
            (torch.empty(len(signal), 0, dtype=torch.int32), torch.empty(len(signal), 0))
            if signal.tail_ids is None or signal.tail_logprobs is None
            else (signal.tail_ids, signal.tail_logprobs.float())
        )
        missing = (0, most - draws[0].shape[1])
        ids.append(pad(draws[0], missing, value=-1))
        logprobs.append(pad(draws[1], missing))
    return torch.cat(ids), torch.cat(logprobs)
