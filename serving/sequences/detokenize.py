"""Incremental text from token ids: no partial characters, no stop strings nor anything after them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 6  # tokens of the prompt that are decoded too, for tokenizers whose spaces depend on the tokens before
INCOMPLETE = "\ufffd"
LONGEST = 64  # tokens without a whole character, after which their bytes are released as they are


class Detokenizer:
    """Text of one answer, token by token.

    `text` is all released text. A tail that may be the start of a stop string, and bytes of an unfinished character,
    are held back until later tokens or `flush` decide. Without a tokenizer there is no text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, prompt_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""
        self.stopped_by: str | None = None
        self._ids = list(prompt_ids[-CONTEXT:])
        # Ids from `_decoded` on are decoded anew for each token. The text before `_read` is out or held back.
        self._decoded = 0
        self._read = len(self._ids)
        self._held_back = ""
        self._put_off: list[int] = []

    def add(self, token: int, may_stop: bool = True) -> str:
        """Append a token and return the text that it releases. Sets `stopped_by` when a stop string is complete."""
        before = self.catch_up()
        self._ids.append(token)
        new = self._new_text(final=False)
        return before + (self._release(new) if may_stop else self._release_all(new))

    def later(self, token: int) -> str:
        """Append a token, put off its decoding, and return no text. For texts without stop strings."""
        self._put_off.append(token)
        return ""

    @property
    def behind(self) -> bool:
        """True if tokens wait for `catch_up`."""
        return bool(self._put_off)

    def catch_up(self) -> str:
        """Decode the tokens that `later` has put off. Return the text that they would have released in `add`."""
        waiting, self._put_off = self._put_off, []
        return "".join([self.add(token) for token in waiting])

    def flush(self) -> str:
        """End the text: return all that was held back, an unfinished character as a replacement character."""
        if self.stopped_by is not None:
            return ""
        before = self.catch_up()
        released = self._release(self._new_text(final=True))
        rest, self._held_back = self._held_back, ""
        self.text += rest
        return before + released + rest

    def _new_text(self, final: bool) -> str:
        """Decode a window of recent tokens with and without the new ones, and return the difference."""
        before = self._decode(self._ids[self._decoded : self._read])
        after = self._decode(self._ids[self._decoded :])
        if after == before:
            del self._ids[self._read :]  # special tokens: each later one would decode them again
            return ""
        waits = after.endswith(INCOMPLETE) and not final and len(self._ids) - self._read < LONGEST
        if len(after) <= len(before) or waits:
            return ""
        self._decoded, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _release(self, new: str) -> str:
        pending = self._held_back + new
        # The stop string that begins first counts, of several that begin there the longest.
        stops = [(start, -len(stop), stop) for stop in self.stop if (start := pending.find(stop)) >= 0]
        if stops:
            end, _, self.stopped_by = min(stops)
            self._held_back = ""
        else:
            end = len(pending) - _possible_start(pending, self.stop)
            self._held_back = pending[end:]
        self.text += pending[:end]
        return pending[:end]

    def _release_all(self, new: str) -> str:
        """Release text without looking for stop strings, as before `min_tokens`."""
        certain, self._held_back = self._held_back + new, ""
        self.text += certain
        return certain

    def _decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest tail of `text` that a stop string starts with."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
