"""What a request's parameters do to logits before temperature and filters: biases, penalties, bans.

The same functions serve the target's logits, at every position of a speculated window, and the draft's, on its own
columns. Order, as in vLLM: allowed ids, bad words, minimum length, bias, then penalties. Banned means −inf.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.serving.requests import Sequence


class Place(NamedTuple):
    """Where a row of logits stands: after a sequence's tokens and some drafted ones."""

    sequence: Sequence
    drafted: tuple[int, ...] = ()


class Columns:
    """Which column of the logits stands for which token id."""

    def __init__(self, vocab_size: int, kept_ids: Tensor | None = None) -> None:
        self.kept_ids = kept_ids
        self._column: Tensor | None = None
        if kept_ids is not None:
            self._column = torch.full((vocab_size,), -1, dtype=torch.int64, device=kept_ids.device)
            self._column[kept_ids] = torch.arange(len(kept_ids), device=kept_ids.device)

    def of(self, ids: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Columns of those of `ids [n]` (int64) that have one, and their `values [n]` (zeros where there are none)."""
        values = torch.zeros(len(ids), device=ids.device) if values is None else values
        if self._column is None:
            return ids, values
        found = self._column[ids]
        return found[found >= 0], values[found >= 0]

    def ids(self, columns: Tensor) -> Tensor:
        """Token ids of columns."""
        return columns if self.kept_ids is None else self.kept_ids[columns]


def needs_transform(sequence: Sequence) -> bool:
    """Whether anything but temperature and filters changes this sequence's logits now."""
    params = sequence.params
    return bool(
        params.penalises
        or params.logit_bias
        or params.bad_words
        or params.bad_word_ids
        or params.allowed_token_ids is not None
        or sequence.output_length < params.min_tokens
    )


def transform(logits: Tensor, places: Seq[Place], columns: Columns) -> None:
    """Change `logits [N, width]` float32 in place; row n stands at `places[n]`."""
    texts: dict[str, _Text] = {}  # the rows of a window share theirs
    for row, place in zip(logits, places, strict=True):
        sequence = place.sequence
        if not needs_transform(sequence):
            continue
        _ban(row, place, columns)
        _bias(row, place, columns)
        if sequence.params.penalises:
            if sequence.id not in texts:
                texts[sequence.id] = _Text.of(sequence, row.device)
            _penalise(row, place, texts[sequence.id], columns)


@dataclass(frozen=True)
class _Text:
    """What penalties look at: the ids seen so far, and those written."""

    seen: Tensor  # [n] int64, once each
    written: Tensor  # [output length] int64

    @classmethod
    def of(cls, sequence: Sequence, device: torch.device) -> _Text:
        return cls(_ids({*sequence.tokens}, device), _ids(sequence.output_ids, device))


def _ban(row: Tensor, place: Place, columns: Columns) -> None:
    sequence, params = place.sequence, place.sequence.params
    if params.allowed_token_ids is not None:
        allowed, _ = columns.of(_ids(params.allowed_token_ids, row.device))
        row.masked_fill_(torch.ones_like(row, dtype=torch.bool).index_fill_(0, allowed, False), -torch.inf)
    ban = set(_ended_by_bad_word(place))
    if sequence.output_length + len(place.drafted) < params.min_tokens:
        ban |= sequence.stop_ids
    if ban:
        row[columns.of(_ids(ban, row.device))[0]] = -torch.inf


def _bias(row: Tensor, place: Place, columns: Columns) -> None:
    bias = place.sequence.params.logit_bias
    if bias:
        places, values = columns.of(_ids(bias, row.device), torch.tensor(list(bias.values()), device=row.device))
        row[places] += values


def _penalise(row: Tensor, place: Place, text: _Text, columns: Columns) -> None:
    """Repetition (CTRL): logits of seen ids shrink; presence and frequency: output ids lose a constant or per count."""
    params, drafted = place.sequence.params, _ids(place.drafted, row.device)
    if params.repetition_penalty != 1.0:
        seen, _ = columns.of(torch.cat([text.seen, drafted]).unique())
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        written, counts = torch.cat([text.written, drafted]).unique(return_counts=True)
        places, times = columns.of(written, counts)
        row[places] -= params.presence_penalty + params.frequency_penalty * times


def _ended_by_bad_word(place: Place) -> list[int]:
    """Ids that would complete a bad word here."""
    words = place.sequence.bad_words
    if not words:
        return []
    longest = max(len(word) for word in words)
    recent = (place.sequence.output_ids[-longest:] + list(place.drafted))[-longest:]
    return [word[-1] for word in words if len(word) == 1 or recent[-(len(word) - 1) :] == list(word[:-1])]


def _ids(ids: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)
