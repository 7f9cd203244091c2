"""Committing verdicts: new tokens, text, cache, statistics, and finished sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from distillspec.models.features import states_of_text
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.acceptance import RowResult, Trial, trials_of, tried_versions, version_in_use
from distillspec.serving.base.outputs import token_logprobs
from distillspec.serving.base.requests import SequenceState, TokenLogprob
from distillspec.serving.base.transfer import rows_of, to_device
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.decoding.verdict import Judgement, TreeVerdict
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.proposers.base import versions_of
from distillspec.serving.proposers.guarded_proposer import GuardedProposer
from distillspec.serving.sequences.manager import SequenceManager

NOT_FINITE = "the target's logits are not finite (NaN or infinity) for this request"


@dataclass(frozen=True)
class Emission:
    """New tokens of one sequence, with the tree and the rows of logits that decided them."""

    sequence: SequenceState  # its last `len(rows)` tokens are the new ones
    tree: TokenTree  # the drafted tokens
    path: tuple[int, ...]  # accepted nodes, also those behind a stop token
    rows: tuple[int, ...]  # for each new token its row in the step's logits
    trials: tuple[Trial, ...]  # drafted tokens that were tried
    versions: Mapping[str, str]  # of the engine's draft models, by source
    cache: SlotCache  # the target's

    @property
    def draft_version(self) -> str:
        """The version of the draft in use, "" without one and where others alone proposed tokens."""
        return version_in_use(self.trials, self.versions)

    def states(self) -> Tensor | None:
        """Return the target's states `cache.state_ids` `[L − 1, F]` of all the text's tokens but the last.

        None: the cache keeps none, or not of all.
        """
        slot, count = self.sequence.held_slot, len(self.sequence.tokens) - 1
        whole = self.sequence.computed >= count and slot not in self.cache.lacking
        return states_of_text(self.cache, slot, count) if whole else None


class Observer(Protocol):
    """Sees the target's raw logits at every emitted token, to record signals and replay logs."""

    def __call__(self, emissions: Sequence[Emission], logits: Tensor) -> None:
        """Observe one step.

        Args:
            emissions: of all sequences with new tokens.
            logits: `[n, V]` of the whole step, of any float dtype. Valid during the call, and not to be changed.
        """
        ...


class Committer:
    """Writes verdicts into sequences and the target's cache, and shows the step to `observer`."""

    def __init__(self, cache: SlotCache, sequences: SequenceManager) -> None:
        self.cache = cache
        self.sequences = sequences
        self.observer: Observer | None = None

    def commit(
        self,
        windows: Sequence[VerificationWindow],
        judgements: Sequence[Judgement],
        logits: Tensor,
        guarded: GuardedProposer,
        now: float,
    ) -> tuple[RowResult, ...]:
        """Write every verdict into its sequence and finish those that have ended.

        Args:
            windows: drafted trees, in the order of `judgements`.
            judgements: their verdicts, None where logits are NaN.
            logits: `[Σ (1 + nodes), V]` rows of the windows, one after another.
            guarded: receives the accepted tokens.
            now: time of first tokens and ends.
        """
        results = []
        emissions: list[Emission] = []
        versions = versions_of(guarded.proposer)
        rows = _judging_rows(windows, judgements)
        logprobs = _logprobs(windows, judgements, rows, logits)
        self._reorder_cache(windows, judgements, logits.device)
        for place, (window, judgement) in enumerate(zip(windows, judgements, strict=True)):
            verdict = judgement.verdict
            if verdict is None:
                results.append(self._retry_without_draft(window, guarded) if len(window.tree) else self._fail(window))
                continue
            self._count_as_read(window, verdict)
            result = self._commit_text(window, verdict, logprobs.get(place, []), guarded)
            _count(window, result, versions, now)
            if not judgement.sound:  # a rejected token left NaN in the cache, and masked NaN is still NaN
                self.cache.clear(window.sequence.held_slot, window.sequence.computed)
            results.append(result)
            judged = tuple(rows[place][: result.emitted])
            emissions.append(
                Emission(window.sequence, window.tree, verdict.path, judged, result.trials, versions, self.cache)
            )
        if self.observer is not None and emissions:
            self.observer(emissions, logits)
        for window in windows:
            if window.sequence.finish_reason is not None:
                self.sequences.finish(window.sequence, now)
        return tuple(results)

    def _retry_without_draft(self, window: VerificationWindow, guarded: GuardedProposer) -> RowResult:
        """End speculation for a row with NaN. A drafted token may be the cause, so the next step reads none."""
        sequence = window.sequence
        sequence.speculates = False
        sequence.failed_sources.update([group.source for group in window.tree.groups])
        self.cache.clear(sequence.held_slot, sequence.computed)
        # It has read the newest token, and another draft may be put in its place.
        guarded.committed(sequence, window.tree, ())
        return _result(window, (), 0)

    def _fail(self, window: VerificationWindow) -> RowResult:
        """End a request whose own logits are NaN, and clear its slot."""
        sequence = window.sequence
        sequence.finish_reason = "error"
        sequence.error = NOT_FINITE
        self.cache.clear(sequence.held_slot)
        self.sequences.pool.forget(sequence.held_slot)
        self.sequences.deltas.end(sequence, self.sequences.texts[sequence.id])
        return _result(window, (), 0)

    def _commit_text(
        self,
        window: VerificationWindow,
        verdict: TreeVerdict,
        logprobs: Sequence[TokenLogprob],
        guarded: GuardedProposer,
    ) -> RowResult:
        """Append the accepted tokens and the target's own to the sequence, or keep its candidates for that one."""
        sequence, tree, path = window.sequence, window.tree, verdict.path
        sequence.candidates = (verdict.next_token, *verdict.others) if verdict.others else ()
        before = sequence.output_length
        text = self._append_tokens(sequence, _tokens(window, verdict))
        emitted = sequence.output_length - before
        # A target that gives candidates in place of a token has judged the nodes behind the path, too.
        judged = emitted + bool(verdict.others and sequence.finish_reason is None)
        result = _result(window, path, emitted, judged)
        sequence.logprobs += logprobs[: result.emitted]
        self.sequences.deltas.add(sequence, before, text, self.sequences.texts[sequence.id])
        guarded.committed(sequence, tree, path)
        return result

    def _reorder_cache(
        self, windows: Sequence[VerificationWindow], judgements: Sequence[Judgement], device: torch.device
    ) -> None:
        """Bring the accepted nodes of all rows into order in the cache, from each sequence's length on.

        Only nodes that are not in place already are moved: path (0, 1, 5) moves one.
        """
        moves = [
            (window.sequence.held_slot, window.sequence.computed + 1 + node, window.sequence.computed + 1 + place)
            for window, judgement in zip(windows, judgements, strict=True)
            for place, node in enumerate(judgement.verdict.path if judgement.verdict is not None else ())
            if node != place
        ]
        if moves:
            self.cache.gather(to_device(list(zip(*moves, strict=True)), device))

    def _count_as_read(self, window: VerificationWindow, verdict: TreeVerdict) -> None:
        """Count the root and the accepted nodes as read. They are in the cache, in order from the sequence's length on.

        A step reads the newest token, so the last one counts as unread where none follows it yet.
        """
        sequence, tree, path = window.sequence, window.tree, verdict.path
        self.sequences.pool.record(
            sequence.held_slot, [sequence.tokens[-1], *(tree.tokens[node] for node in path)], sequence.computed
        )
        sequence.computed += len(path) + (not verdict.others)

    def _append_tokens(self, sequence: SequenceState, tokens: Sequence[int]) -> str:
        """Append tokens until one ends the answer. Return the text that they release, as far as it is needed now."""
        text = self.sequences.texts[sequence.id]
        pieces = []
        later = self.sequences.deltas.text_later and not text.stop
        for token in tokens:
            sequence.tokens.append(token)
            if token in sequence.stop_ids:
                sequence.finish_reason, sequence.stop_reason = "stop", token
            else:
                may_stop = sequence.output_length >= sequence.params.min_tokens
                pieces.append(text.later(token) if later else text.add(token, may_stop=may_stop))
                if text.stopped_by is not None:
                    sequence.finish_reason, sequence.stop_reason = "stop", text.stopped_by
            if sequence.finish_reason is None and sequence.room <= 0:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                pieces.append(text.flush())
                break
        return "".join(pieces)


def _result(window: VerificationWindow, path: tuple[int, ...], emitted: int, judged: int = 0) -> RowResult:
    sequence, tree = window.sequence, window.tree
    trials = trials_of(tree, path, judged)
    return RowResult(
        sequence.id,
        tree.depth,
        nodes=len(tree) - len(tree.roots),
        accepted=len(path) - bool(tree.roots and path),
        emitted=emitted,
        trials=trials,
        domain=sequence.request.domain,
        parents=() if tree.is_chain else tree.parents,
        path=() if tree.is_chain else path,
    )


def _tokens(window: VerificationWindow, verdict: TreeVerdict) -> list[int]:
    accepted = [window.tree.tokens[node] for node in verdict.path]
    return accepted if verdict.others else [*accepted, verdict.next_token]


def _judging_rows(windows: Sequence[VerificationWindow], judgements: Sequence[Judgement]) -> list[list[int]]:
    """Return for each verdict the rows of logits that decided its tokens, empty without a verdict."""
    judging = []
    first = 0
    for window, judgement in zip(windows, judgements, strict=True):
        verdict = judgement.verdict
        rows = [] if verdict is None else [first, *(first + 1 + node for node in verdict.path)]
        judging.append(rows[:-1] if verdict is not None and verdict.others else rows)
        first += 1 + len(window.tree)
    return judging


def _logprobs(
    windows: Sequence[VerificationWindow],
    judgements: Sequence[Judgement],
    rows: Sequence[Sequence[int]],
    logits: Tensor,
) -> dict[int, list[TokenLogprob]]:
    """Return log-probabilities of the verdicts' tokens by window, for requests that want them. One device read."""
    wanted = {
        place: (_tokens(window, judgement.verdict), window.sequence.params.logprobs)
        for place, (window, judgement) in enumerate(zip(windows, judgements, strict=True))
        if judgement.verdict is not None and window.sequence.params.logprobs is not None
    }
    if not wanted:
        return {}
    chosen = rows_of(logits, [row for place in wanted for row in rows[place]])
    flat = [token for tokens, _ in wanted.values() for token in tokens]
    logprobs = iter(token_logprobs(chosen, flat, [most for tokens, most in wanted.values() for _ in tokens]))
    return {place: list(islice(logprobs, len(tokens))) for place, (tokens, _) in wanted.items()}


def _count(window: VerificationWindow, result: RowResult, versions: Mapping[str, str], now: float) -> None:
    stats = window.sequence.stats
    stats.steps += 1
    if stats.first_token_s is None:
        stats.first_token_s = now
    stats.record_verification(result.nodes, result.depth, result.trials, result.emitted)
    tried = tried_versions(result.trials, versions)
    stats.draft_versions += [version for version in tried if version not in stats.draft_versions]
