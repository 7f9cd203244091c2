"""Biases, penalties and bans: changes of logits before temperature and filters.

The same functions serve the target's logits, at every position of a speculated window, and the draft's, on its own
columns. Order, as in vLLM: allowed ids, bad words, minimum length, bias, then penalties. Banned means −inf. The ids are
found on the host, without a device read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.transfer import to_device, to_host


class Place(NamedTuple):
    """Position of a row of logits: after a sequence's tokens and some drafted ones."""

    sequence: SequenceState
    drafted: tuple[int, ...] = ()


class Columns:
    """Mapping between columns of the logits and token ids."""

    def __init__(self, vocab_size: int, kept_ids: Tensor | None = None) -> None:
        self.kept_ids = kept_ids
        self.width = vocab_size if kept_ids is None else len(kept_ids)
        self._column: dict[int, int] | None = None
        if kept_ids is not None:
            self._column = {token: column for column, token in enumerate(to_host(kept_ids).tolist())}

    def of(self, ids: Iterable[int]) -> list[int]:
        """Return the columns of those ids that have one."""
        return list(ids) if self._column is None else [self._column[i] for i in ids if i in self._column]

    def of_values(self, values: Mapping[int, float]) -> dict[int, float]:
        """Return values by column, of those ids that have one."""
        if self._column is None:
            return dict(values)
        return {self._column[i]: value for i, value in values.items() if i in self._column}

    def ids(self, columns: Tensor) -> Tensor:
        """Return the token ids of columns."""
        return columns if self.kept_ids is None else self.kept_ids[columns]


def needs_transform(sequence: SequenceState) -> bool:
    """Return True if anything but temperature and filters changes this sequence's logits now."""
    params = sequence.params
    return bool(
        params.penalises
        or params.logit_bias
        or params.bad_words
        or params.bad_word_ids
        or params.allowed_token_ids is not None
        or sequence.output_length < params.min_tokens
    )


def transform(logits: Tensor, places: Sequence[Place], columns: Columns) -> None:
    """Change `logits [N, width]` float32 in place, row n for the position `places[n]`."""
    options: dict[str, _RowOptions] = {}  # shared by the rows of a window
    for row, place in zip(logits, places, strict=True):
        sequence = place.sequence
        if not needs_transform(sequence):
            continue
        if sequence.id not in options:
            options[sequence.id] = _RowOptions(sequence, columns, row.device)
        options[sequence.id].apply(row, place.drafted)


class _RowOptions:
    """Text and sampling parameters of one sequence as columns on the device, shared by its rows of a step."""

    def __init__(self, sequence: SequenceState, columns: Columns, device: torch.device) -> None:
        params = sequence.params
        self.sequence, self.params, self.columns, self.device = sequence, params, columns, device
        self.forbidden = None if params.allowed_token_ids is None else self._all_but(params.allowed_token_ids)
        self.bias = self._uploaded(columns.of_values(params.logit_bias)) if params.logit_bias else None
        self.seen: set[int] = set(sequence.tokens) if params.repetition_penalty != 1.0 else set()
        counts = params.presence_penalty or params.frequency_penalty
        self.written: Counter[int] = Counter(sequence.output_ids) if counts else Counter()
        self.seen_columns = self._ids(self.seen)
        self.losses = self._uploaded(columns.of_values(self._losses(self.written)))

    def apply(self, row: Tensor, drafted: tuple[int, ...]) -> None:
        """Change the row `[width]` that follows the text and `drafted`."""
        if self.forbidden is not None:
            row.masked_fill_(self.forbidden, -torch.inf)
        banned = self._banned(drafted)
        if banned:
            row[self._ids(banned)] = -torch.inf
        if self.bias is not None:
            row[self.bias[0]] += self.bias[1]
        if self.params.repetition_penalty != 1.0:
            self._repeat_less(row, set(drafted) - self.seen)
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._write_less(row, drafted)

    def _banned(self, drafted: tuple[int, ...]) -> set[int]:
        banned = set(_ended_by_bad_word(self.sequence, drafted))
        if self.sequence.output_length + len(drafted) < self.params.min_tokens:
            banned |= self.sequence.stop_ids
        return banned

    def _repeat_less(self, row: Tensor, more: set[int]) -> None:
        """Apply the repetition penalty (CTRL): make seen ids less likely."""
        penalty = self.params.repetition_penalty
        seen = torch.cat([self.seen_columns, self._ids(more)]) if more else self.seen_columns
        values = row[seen]
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)

    def _write_less(self, row: Tensor, drafted: tuple[int, ...]) -> None:
        """Apply presence and frequency penalties: ids of the output lose a constant, and a constant per occurrence."""
        # Drafted ids lose what written ones lose, in one subtraction: two would round differently.
        counts = Counter(drafted)
        again = self._uploaded(
            self.columns.of_values(self._losses({i: self.written[i] + n for i, n in counts.items()}))
        )
        before = row[again[0]]
        row[self.losses[0]] -= self.losses[1]
        row[again[0]] = before - again[1]

    def _losses(self, counts: Mapping[int, int]) -> dict[int, float]:
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        return {token: presence + frequency * count for token, count in counts.items()}

    def _all_but(self, ids: Iterable[int]) -> Tensor:
        mask = torch.ones(self.columns.width, dtype=torch.bool)
        mask[self.columns.of(ids)] = False
        return to_device(mask, self.device)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return to_device(self.columns.of(ids), self.device)

    def _uploaded(self, values: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        """Upload columns and their values."""
        return to_device(list(values), self.device), to_device(list(values.values()), self.device, torch.float32)


def _ended_by_bad_word(sequence: SequenceState, drafted: tuple[int, ...]) -> list[int]:
    """Return the ids that would complete a bad word here."""
    words = sequence.bad_words
    if not words:
        return []
    longest = max(len(word) for word in words)
    recent = (sequence.output_ids[-longest:] + list(drafted))[-longest:]
    return [word[-1] for word in words if len(word) == 1 or recent[-(len(word) - 1) :] == list(word[:-1])]
