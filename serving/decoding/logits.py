"""Biases, penalties and bans: changes of logits before temperature and filters.

The same changes serve the target's logits, at every position of a speculated window, and the draft's, on its own
columns. Order, as in vLLM: allowed ids, bad words, minimum length, bias, then penalties. Banned means −inf. The ids are
found on the host, and each kind of change is one scatter over all rows, without a device read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
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
        """Return the columns of those ids that have one. A tokenizer may have ids that the head lacks."""
        if self._column is None:
            return [i for i in ids if i < self.width]
        return [self._column[i] for i in ids if i in self._column]

    def of_values(self, values: Mapping[int, float]) -> dict[int, float]:
        """Return values by column, of those ids that have one."""
        if self._column is None:
            return {i: value for i, value in values.items() if i < self.width}
        return {self._column[i]: value for i, value in values.items() if i in self._column}

    def ids(self, columns: Tensor) -> Tensor:
        """Return the token ids of columns. −1, no column, stays −1."""
        return columns if self.kept_ids is None else torch.where(columns < 0, columns, self.kept_ids[columns])


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
    """Change `logits [N, width]` float32 in place, row n for the position `places[n]`. They must be contiguous."""
    changes = _Changes(columns)
    numbered = groupby(enumerate(places), key=lambda pair: pair[1].sequence.id)
    for _, group in numbered:  # the rows of a window follow each other
        rows = [(row, place.drafted) for row, place in group]
        sequence = places[rows[0][0]].sequence
        if needs_transform(sequence):
            changes.add(sequence, rows)
    changes.apply(logits)


class _Uploaded(NamedTuple):
    """Numbers for elements of the flattened logits, on their device."""

    indices: Tensor  # [n] int64
    numbers: Tensor  # [n] float32


class _Scatter:
    """Indices into the flattened logits, and a number for each, collected on the host."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._indices: list[Tensor] = []
        self._numbers: list[Tensor] = []

    def add(self, rows: Sequence[int], values: Mapping[int, float]) -> None:
        """Add the same columns, with their values, in all of `rows`. No index may be added twice."""
        if values:
            indices = torch.tensor(list(rows))[:, None] * self.width + torch.tensor(list(values))
            self._indices.append(indices.flatten())
            self._numbers.append(torch.tensor(list(values.values()), dtype=torch.float32).repeat(len(rows)))

    def uploaded(self, device: torch.device) -> _Uploaded | None:
        """Return all indices and numbers, None if there are none."""
        if not self._indices:
            return None
        return _Uploaded(to_device(torch.cat(self._indices), device), to_device(torch.cat(self._numbers), device))


class _Changes:
    """Changes of many rows, by kind in the order in which they apply."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.limited: list[int] = []  # rows in which only `allowed` ids may be written
        kinds = [_Scatter(columns.width) for _ in range(6)]
        self.allowed, self.banned, self.bias, self.seen, self.written, self.written_again = kinds

    def add(self, sequence: SequenceState, rows: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Add the changes of one sequence in rows that follow its text and `drafted` tokens."""
        params, all_rows = sequence.params, [row for row, _ in rows]
        if params.allowed_token_ids is not None:
            self.limited += all_rows
            self.allowed.add(all_rows, self._same(params.allowed_token_ids, 0.0))
        self.bias.add(all_rows, self.columns.of_values(params.logit_bias))
        for row, drafted in rows:
            self.banned.add([row], self._same(_banned(sequence, drafted), -torch.inf))
        if params.repetition_penalty != 1.0:
            self._add_seen(sequence, rows)
        if params.presence_penalty or params.frequency_penalty:
            self._add_written(sequence, rows)

    def _add_seen(self, sequence: SequenceState, rows: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Add the repetition penalty (CTRL), which makes ids of prompt and output less likely."""
        penalty, seen = sequence.params.repetition_penalty, set(sequence.tokens)
        self.seen.add([row for row, _ in rows], self._same(seen, penalty))
        for row, drafted in rows:
            self.seen.add([row], self._same(set(drafted) - seen, penalty))

    def _add_written(self, sequence: SequenceState, rows: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Add presence and frequency penalties: ids of the output lose a constant, and a constant per occurrence."""
        presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
        written = Counter(sequence.output_ids)

        def losses(counts: Mapping[int, int]) -> dict[int, float]:
            return self.columns.of_values({token: presence + frequency * n for token, n in counts.items()})

        self.written.add([row for row, _ in rows], losses(written))
        for row, drafted in rows:
            self.written_again.add([row], losses({i: written[i] + n for i, n in Counter(drafted).items()}))

    def apply(self, logits: Tensor) -> None:
        """Change `logits [N, width]` float32 in place."""
        flat, device = logits.view(-1), logits.device
        if self.limited:
            self._forbid_the_rest(logits, flat)
        if (banned := self.banned.uploaded(device)) is not None:
            flat.index_fill_(0, banned.indices, -torch.inf)
        if (bias := self.bias.uploaded(device)) is not None:
            flat.index_copy_(0, bias.indices, flat[bias.indices] + bias.numbers)
        if (seen := self.seen.uploaded(device)) is not None:
            values = flat[seen.indices]
            flat.index_copy_(0, seen.indices, torch.where(values > 0, values / seen.numbers, values * seen.numbers))
        # Drafted ids lose what written ones lose, in one subtraction: two would round differently.
        again = self.written_again.uploaded(device)
        lowered = None if again is None else flat[again.indices] - again.numbers
        if (written := self.written.uploaded(device)) is not None:
            flat.index_copy_(0, written.indices, flat[written.indices] - written.numbers)
        if again is not None and lowered is not None:
            flat.index_copy_(0, again.indices, lowered)

    def _forbid_the_rest(self, logits: Tensor, flat: Tensor) -> None:
        allowed = self.allowed.uploaded(logits.device)
        kept = None if allowed is None else flat[allowed.indices]
        logits.index_fill_(0, to_device(self.limited, logits.device), -torch.inf)
        if allowed is not None and kept is not None:
            flat.index_copy_(0, allowed.indices, kept)

    def _same(self, ids: Iterable[int], value: float) -> dict[int, float]:
        """Return the columns of `ids`, all with one value."""
        return dict.fromkeys(self.columns.of(ids), value)


def _banned(sequence: SequenceState, drafted: tuple[int, ...]) -> set[int]:
    """Return the ids that may not follow the text and `drafted`."""
    banned = set(_ended_by_bad_word(sequence, drafted))
    if sequence.output_length + len(drafted) < sequence.params.min_tokens:
        banned |= sequence.stop_ids
    return banned


def _ended_by_bad_word(sequence: SequenceState, drafted: tuple[int, ...]) -> list[int]:
    """Return the ids that would complete a bad word here."""
    words = sequence.bad_words
    if not words:
        return []
    longest = max(len(word) for word in words)
    written = sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - longest) :]
    recent = (written + list(drafted))[-longest:]
    return [word[-1] for word in words if len(word) == 1 or recent[-(len(word) - 1) :] == list(word[:-1])]
