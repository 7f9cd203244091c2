"""What a request's parameters do to logits before temperature and filters: biases, penalties, bans.

The same functions serve the target's logits, at every position of a speculated window, and the draft's, on its own
columns. Order, as in vLLM: allowed ids, bad words, minimum length, bias, then penalties. Banned means −inf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
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

    def of(self, ids: Seq[int], device: torch.device) -> Tensor:
        """Columns of those of `ids` that have one, `[m]` int64."""
        index = torch.tensor(list(ids), dtype=torch.int64, device=device)
        if self._column is None:
            return index
        found = self._column[index]
        return found[found >= 0]

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
    for row, place in zip(logits, places, strict=True):
        if needs_transform(place.sequence):
            _transform_row(row, place, columns)


def _transform_row(row: Tensor, place: Place, columns: Columns) -> None:
    sequence, params = place.sequence, place.sequence.params
    if params.allowed_token_ids is not None:
        banned = torch.ones_like(row, dtype=torch.bool)
        banned[columns.of(params.allowed_token_ids, row.device)] = False
        row.masked_fill_(banned, -torch.inf)
    ban = set(_ended_by_bad_word(place))
    if sequence.output_length + len(place.drafted) < params.min_tokens:
        ban |= sequence.stop_ids
    if ban:
        row[columns.of(sorted(ban), row.device)] = -torch.inf
    for token, bias in params.logit_bias.items():
        row[columns.of([token], row.device)] += bias
    if params.penalises:
        _penalise(row, place, columns)


def _ended_by_bad_word(place: Place) -> list[int]:
    """Ids that would complete a bad word here."""
    words = place.sequence.bad_words
    if not words:
        return []
    longest = max(len(word) for word in words)
    recent = (place.sequence.output_ids[-longest:] + list(place.drafted))[-longest:]
    return [word[-1] for word in words if len(word) == 1 or recent[-(len(word) - 1) :] == list(word[:-1])]


def _penalise(row: Tensor, place: Place, columns: Columns) -> None:
    """Repetition (CTRL): logits of seen ids shrink; presence and frequency: output ids lose a constant or per count."""
    params, sequence = place.sequence.params, place.sequence
    if params.repetition_penalty != 1.0:
        seen = columns.of(sorted({*sequence.tokens, *place.drafted}), row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter([*sequence.output_ids, *place.drafted])
        for token, count in counts.items():
            row[columns.of([token], row.device)] -= params.presence_penalty + params.frequency_penalty * count
