"""Costs of steps as live steps show them: `LiveCosts` of target and draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from distillspec.serving.base.catch_up import catch_up_cost
from distillspec.serving.costs.latency import LatencyModel, draft_work, guessed
from distillspec.serving.costs.live_costs import GUESSED, MEASURED, LiveCosts


class LiveLatency:
    """A `LatencyModel` that every step corrects.

    Args:
        known: measured costs. None: guessed ones.
        drafts_with_model: False where proposals cost next to nothing (prompt lookup).
    """

    def __init__(self, known: LatencyModel | None, *, drafts_with_model: bool = True) -> None:
        start, trust = known or guessed(), GUESSED if known is None else MEASURED
        self.drafts_with_model = drafts_with_model
        self._target = LiveCosts(start.target, trust)
        self._draft = LiveCosts(start.draft, trust) if drafts_with_model and start.draft is not None else None
        self._guess = start if known is None else None  # until the draft was measured
        self._draft_free_s = start.draft_free_s
        self._latency: LatencyModel | None = None

    @property
    def latency(self) -> LatencyModel:
        """The present estimate."""
        if self._latency is None:
            draft = None if self._draft is None else self._draft.table
            self._latency = LatencyModel(self._target.table, draft, self._draft_free_s)
        return self._latency

    def observe(
        self,
        contexts: Sequence[int],
        proposed: Sequence[int],
        unread_tokens: Sequence[int | None],
        prefill_tokens: int,
        target_s: float,
        draft_s: float,
        at_once: bool = False,
        reads: Sequence[Sequence[int]] | None = None,
    ) -> bool:
        """Learn from a step.

        Args:
            contexts: tokens of each decoding row in the cache.
            proposed: tokens that each row drafted.
            unread_tokens: of each row, those that the draft model has not read, None if another source drafted.
            prefill_tokens: prompt tokens in the target's pass.
            target_s: seconds of the target's pass.
            draft_s: seconds of all draft passes.
            at_once: the draft drafts blocks.
            reads: tokens that each of the draft's passes read of a row, None: one for each token of a chain.

        Returns:
            True if the times could be predicted well enough to judge by.
        """
        self._latency = None
        tokens = sum(proposed) + len(contexts) + prefill_tokens
        sure = self._target.observe(sum(contexts), [tokens] if tokens else [], target_s, len(contexts))
        if self._draft is None:
            return sure
        if not any(proposed):
            self._guess_draft(tokens)
            return sure
        self._guess = None
        depths = proposed if reads is None else list(map(len, reads))
        lengths = [0 if unread is None else k for k, unread in zip(depths, unread_tokens, strict=True)]
        work = draft_work(contexts, lengths, at_once)
        passes: list[float] = [*work.passes]
        if reads is not None and not at_once:
            own = [row for row, length in zip(reads, lengths, strict=True) if length]
            passes = [float(sum(level)) for level in zip_longest(*own, fillvalue=0)]
        further, own_passes = catch_up_cost(
            [unread for unread, k in zip(unread_tokens, lengths, strict=True) if k and unread]
        )
        if own_passes:
            passes.append(further)
        elif further:
            passes[0] += further
        return self._draft.observe(work.context, passes, draft_s, work.rows) and sure

    def _guess_draft(self, tokens: int) -> None:
        """Take a draft that was never measured for as much faster than guessed as the target is."""
        if self._guess is not None and self._guess.draft is not None and tokens:
            factor = self._target.table.seconds(0, tokens) / self._guess.target.seconds(0, tokens)
            self._draft = LiveCosts(self._guess.draft.scaled(factor), GUESSED)
