"""Prefixes that a sequence finds in slots, and the memory that they save."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.execution.slot_pool import Prefix, SlotPool
from distillspec.serving.sequences.scheduler import MIN_PREFIX, urgency


class Prefixes:
    """Texts in the pool's slots, as far as sequences may start with them (`HeldTexts`).

    Args:
        reuse: a sequence may start with any text of its tenant. Else only answers to one prompt share.
    """

    def __init__(self, pool: SlotPool, *, reuse: bool) -> None:
        self.pool, self.reuse = pool, reuse

    def salt(self, sequence: SequenceState) -> Hashable:
        """Return the salt of the texts that a sequence may start with: its tenant's, or those of the same request."""
        return sequence.request.cache_key if self.reuse else sequence.arrival - sequence.index

    def find(self, sequence: SequenceState, slots: Sequence[int] | None = None) -> Prefix | None:
        """Return the longest prefix of a sequence in `slots`, by default in all. None if it is not worth a copy."""
        prefix = self.pool.longest_prefix(sequence.tokens[:-1], self.salt(sequence), slots)
        return None if prefix is None or prefix.length < MIN_PREFIX else prefix

    def for_admission(self, sequence: SequenceState, tokens: int, *, shares: bool = False) -> Prefix | None:
        """Return the prefix to admit a sequence with, which reserves `tokens`.

        A free slot's takes memory, which may be too little. A running sequence's takes none.

        Args:
            shares: a running sequence's, since those admitted next count on the memory that it takes none of.
        """
        if not shares:
            prefix = self.find(sequence)
            if prefix is None or self.pool.has_room(tokens, prefix):
                return prefix
        return self.find(sequence, list(self.pool.owners))

    def cached_tokens(self, sequence: SequenceState) -> int:
        """Return how many leading tokens a waiting sequence would find in slots if it were admitted now."""
        prefix = self.find(sequence)
        return 0 if prefix is None else prefix.length

    def shared_tokens(self, running: Sequence[SequenceState]) -> Mapping[str, int]:
        """Return how many tokens of each sequence's pages a more urgent one holds too. Others are left out."""
        if not self.pool.shares_pages:
            return {}
        return self.pool.shared_tokens([s.id for s in sorted(running, key=urgency)])

    def shareable_tokens(self, sequence: SequenceState, running: Sequence[SequenceState]) -> int:
        """Return for how many tokens a waiting sequence would at least use pages that `running` hold."""
        if self.pool.pages is None or not running:
            return 0
        prefix = self.find(sequence, [s.held_slot for s in running])
        return 0 if prefix is None else self.pool.pages.surely_whole(prefix.length)
