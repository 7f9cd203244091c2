"""Text from token ids, bit by bit: never half a character, never a stop string nor anything after it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from transformers import PreTrainedTokenizerBase

CONTEXT = 6  # prompt tokens decoded along, for tokenizers whose spaces depend on what came before
INCOMPLETE = "\ufffd"


class Detokenizer:
    """The text of one answer as its tokens come.

    `text` is everything decided so far; `add` returns what a token made certain. A tail that may be the beginning of
    a stop string, or bytes of an unfinished character, are held back until later tokens or `flush` decide. Without a
    tokenizer there is no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt_ids: Seq[int], stop: Seq[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""
        self.stopped_by: str | None = None
        self._ids = list(prompt_ids[-CONTEXT:])
        self._decoded = 0  # ids before this one are in `text` or held
        self._read = len(self._ids)
        self._held = ""

    def add(self, token: int, may_stop: bool = True) -> str:
        """Append a token; the text it made certain. Sets `stopped_by` when a stop string is complete."""
        self._ids.append(token)
        new = self._new_text(final=False)
        return self._release(new) if may_stop else self._let_through(new)

    def flush(self) -> str:
        """The end: whatever is held back comes out, an unfinished character as a replacement character."""
        if self.stopped_by is not None:
            return ""
        released = self._release(self._new_text(final=True))
        rest, self._held = self._held, ""
        self.text += rest
        return released + rest

    def _new_text(self, final: bool) -> str:
        """Decode a window of recent tokens twice, with and without the new ones: the difference is new."""
        before = self._decode(self._ids[self._decoded : self._read])
        after = self._decode(self._ids[self._decoded :])
        if len(after) <= len(before) or (after.endswith(INCOMPLETE) and not final):
            return ""
        self._decoded, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _release(self, new: str) -> str:
        pending = self._held + new
        found = [(place, -len(stop), stop) for stop in self.stop if (place := pending.find(stop)) >= 0]
        if found:
            place, _, self.stopped_by = min(found)
            certain, self._held = pending[:place], ""
        else:
            keep = _possible_beginning(pending, self.stop)
            certain, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += certain
        return certain

    def _let_through(self, new: str) -> str:
        """Nothing stops yet (min_tokens)."""
        certain, self._held = self._held + new, ""
        self.text += certain
        return certain

    def _decode(self, ids: Seq[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _possible_beginning(text: str, stops: Seq[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
