"""Redaction of answers by an operator's hook. The signal is made to match the remaining text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distillspec.serving.online.log.records import PLAIN, LoggedAnswer
from distillspec.serving.online.log.shard import ROW_FIELDS
from distillspec.signals import TeacherSignal

Redaction = Callable[[LoggedAnswer], LoggedAnswer | None]
"""Takes an answer before it is written. Returns the part that may be kept, or None."""


class BadRedaction(ValueError):
    """A hook returned something that cannot be logged. The message quotes no text."""


def mask(answer: LoggedAnswer, positions: Iterable[int], by: int, *, prompt: Iterable[int] = ()) -> LoggedAnswer:
    """Replace the response tokens at `positions`, and the prompt's at `prompt`, by the token `by`: for hooks."""
    response_ids, prompt_ids = list(answer.response_ids), list(answer.prompt_ids)
    for ids, masked in ((response_ids, positions), (prompt_ids, prompt)):
        for index in masked:
            ids[index] = by
    return replace(answer, response_ids=tuple(response_ids), prompt_ids=tuple(prompt_ids))


def redacted(answer: LoggedAnswer, hook: Redaction, vocab_size: int) -> LoggedAnswer | None:
    """Return the part of an answer that `hook` keeps. None: no prompt or no response token is left.

    The hook changes token ids, and the rows follow. A replaced id is removed from the row of its token. An id that is
    nowhere in the kept text is removed from every row: from signal and drafted tokens. If the hook changed the
    number of response tokens, only the common prefix of both texts is kept, since later rows cannot be matched.

    Raises:
        BadRedaction: the hook returned something that cannot be logged. Besides, what the hook raises.
    """
    kept = hook(answer)
    if kept is None:
        return None
    _check(answer, kept, vocab_size)
    kept = _cut(kept, _aligned(answer, kept))
    kept = replace(kept, finished=kept.finished and len(kept) == len(answer), **_of_whole_text(answer, kept))
    return _without_ids(answer, kept) if kept.prompt_ids and kept.response_ids else None


def _check(answer: LoggedAnswer, kept: LoggedAnswer, vocab_size: int) -> None:
    """Check that the answer can be saved. Otherwise it would cost the others of its shard."""
    if not isinstance(kept, LoggedAnswer):
        raise BadRedaction(f"a redaction returns a LoggedAnswer or None, not {type(kept).__name__}")
    if not all(type(i) is int and 0 <= i < vocab_size for i in (*kept.prompt_ids, *kept.response_ids)):
        raise BadRedaction(f"a redaction returned token ids that are not integers from 0 to {vocab_size - 1}")
    if not all(isinstance(word, str) for word in (kept.request_id, kept.tenant, kept.domain)):
        raise BadRedaction("a redaction changed request_id, tenant or domain to something other than a string")
    shapes = [[(rows.shape[1:], rows.dtype) for rows in _rows(each)] for each in (answer, kept)]
    if shapes[0] != shapes[1]:
        raise BadRedaction("a redaction changed the shape of the signal; replace or cut token ids, rows follow")


def _rows(answer: LoggedAnswer) -> list[Tensor]:
    """Return every tensor with one row a token."""
    signal = answer.signal
    return [signal.ids, signal.logprobs, signal.tail, *(getattr(answer, name) for name in ROW_FIELDS)]


def _aligned(answer: LoggedAnswer, kept: LoggedAnswer) -> int:
    """Return the number of leading tokens that are known to match their rows."""
    tokens = len(kept)
    if tokens != len(answer):
        pairs = zip(answer.response_ids, kept.response_ids, strict=False)
        tokens = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(tokens, *map(len, _rows(kept)))


def _cut(answer: LoggedAnswer, tokens: int) -> LoggedAnswer:
    rows = {name: getattr(answer, name)[:tokens] for name in ROW_FIELDS}
    return replace(
        answer,
        response_ids=tuple(answer.response_ids[:tokens]),
        prompt_ids=tuple(answer.prompt_ids),
        signal=answer.signal.rows(0, tokens),
        **rows,
    )


def _of_whole_text(answer: LoggedAnswer, kept: LoggedAnswer) -> dict[str, Any]:
    """Return states and rejected nodes if the text is as it was.

    The states of later tokens, and what was drafted in place of removed text, would reveal that text.
    """
    same = (kept.prompt_ids, kept.response_ids) == (answer.prompt_ids, answer.response_ids)
    return {
        "states": answer.states if same and kept.states is not None else None,
        "nodes": answer.nodes if same and kept.nodes is not None else None,
    }


def _without_ids(answer: LoggedAnswer, kept: LoggedAnswer) -> LoggedAnswer:
    """Remove from `kept` the ids that its text no longer has."""
    gone = {*answer.prompt_ids, *answer.response_ids} - {*kept.prompt_ids, *kept.response_ids}
    before, after = torch.tensor(answer.response_ids[: len(kept)]), torch.tensor(kept.response_ids)
    replaced = torch.where(before == after, -1, before)
    if not gone and not bool((replaced >= 0).any()):
        return kept
    everywhere = torch.tensor(sorted(gone), dtype=torch.int64)

    def is_gone(ids: Tensor) -> Tensor:
        """Mark the removed ids among `ids`, `[R]` or `[R, n]`, row by row."""
        of_row = replaced if ids.dim() == 1 else replaced[:, None]
        return (ids >= 0) & (torch.isin(ids.long(), everywhere) | (ids == of_row))

    blank = is_gone(kept.draft_tokens)
    return replace(
        kept,
        signal=_without_entries(kept.signal, is_gone),
        policy_logprobs=kept.policy_logprobs.masked_fill(replaced >= 0, math.nan),
        outcomes=kept.outcomes.masked_fill(blank, PLAIN),
        draft_tokens=kept.draft_tokens.masked_fill(blank, -1),
        draft_probs=kept.draft_probs.masked_fill(blank, math.nan),
        draft_entropies=kept.draft_entropies.masked_fill(blank, math.nan),
    )


def _without_entries(signal: TeacherSignal, is_gone: Callable[[Tensor], Tensor]) -> TeacherSignal:
    """Turn removed entries into padding and add their mass to the tail."""
    blank = is_gone(signal.ids)
    mass = signal.logprobs.float().exp().masked_fill(~blank, 0.0).sum(-1)
    return replace(
        signal,
        ids=signal.ids.masked_fill(blank, -1),
        logprobs=signal.logprobs.masked_fill(blank, -torch.inf),
        tail=(signal.tail + mass).clamp(max=1.0),
    )
