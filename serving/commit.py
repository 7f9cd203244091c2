"""What a verdict changes: tokens, text, cache, statistics, and who is done."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from distillspec.models.slot_cache import SlotCache
from distillspec.serving.control.base import RowResult
from distillspec.serving.outputs import delta, token_logprobs
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.requests import Sequence, TokenLogprob
from distillspec.serving.roster import Roster
from distillspec.serving.sampling import Judgement, Window
from distillspec.serving.transfer import rows_of, to_device
from distillspec.serving.tree import TokenTree
from distillspec.serving.verification import Verdict

NOT_FINITE = "the target's logits are not finite (NaN or infinity) for this request"


@dataclass(frozen=True)
class Emission:
    """The new tokens of one sequence, and what they were judged by."""

    sequence: Sequence  # its last `len(rows)` tokens are the new ones
    tree: TokenTree  # what was drafted
    path: tuple[int, ...]  # the nodes that stood, those after a stop token included
    rows: tuple[int, ...]  # the step's row of logits for each new token
    draft_version: str  # of the draft in use; "" without one, and where a lookup proposed the tree


class Observer(Protocol):
    """Sees the target's raw logits wherever it wrote a token: for recording signals and replay logs."""

    def __call__(self, emissions: Seq[Emission], logits: Tensor) -> None:
        """`logits [n, V]`, of any float dtype, are the whole step's; they are not to be kept or changed."""
        ...


class Committer:
    """Carries verdicts out on the roster's sequences and the target's cache; `observer` sees what was judged."""

    def __init__(self, roster: Roster, cache: SlotCache) -> None:
        self.roster, self.cache = roster, cache
        self.observer: Observer | None = None

    def commit(
        self,
        windows: Seq[Window],
        judgements: Seq[Judgement],
        logits: Tensor,
        proposer: Proposer | None,
        now: float,
    ) -> tuple[RowResult, ...]:
        """Write every verdict into its sequence, end those that are done.

        `logits` are the windows' rows, one after another, as the verdicts were made from.
        """
        results = []
        emissions: list[Emission] = []
        version = proposer.version if proposer is not None else ""
        rows = _judging_rows(windows, judgements)
        logprobs = _logprobs(windows, judgements, rows, logits)
        for place, (window, judgement) in enumerate(zip(windows, judgements, strict=True)):
            verdict = judgement.verdict
            if verdict is None:
                results.append(self._read_again(window) if len(window.tree) else self._fail(window))
                continue
            self._keep_path(window, verdict.path, logits.device)
            result = self._keep(window, verdict, logprobs.get(place, []), proposer, now)
            if not judgement.sound:  # a rejected token left numbers that are none: weight 0 times NaN is NaN
                self.cache.clear(window.sequence.held_slot, window.sequence.computed)
            results.append(result)
            judged = tuple(rows[place][: result.emitted])
            own = version if window.tree.source == "draft" else ""
            emissions.append(Emission(window.sequence, window.tree, verdict.path, judged, own))
        if self.observer is not None and emissions:
            self.observer(emissions, logits)
        for window in windows:
            if window.sequence.finish_reason is not None:
                self.roster.finish(window.sequence, now)
        return tuple(results)

    def _read_again(self, window: Window) -> RowResult:
        """A drafted token may have spoilt its whole row: the next step reads the newest token alone, and decides."""
        sequence = window.sequence
        sequence.draft_ok = False
        self.cache.clear(sequence.held_slot, sequence.computed)
        return _result(window, 0, 0)

    def _fail(self, window: Window) -> RowResult:
        """The target's numbers are not finite: this request alone ends, and nobody reads what it left."""
        sequence = window.sequence
        sequence.finish_reason, sequence.error = "error", NOT_FINITE
        self.cache.clear(sequence.held_slot)
        self.roster.pool.forget(sequence.held_slot)
        self.roster.deltas.append(delta(sequence, sequence.output_length, self.roster.texts[sequence.id].flush()))
        return _result(window, 0, 0)

    def _keep(
        self, window: Window, verdict: Verdict, logprobs: Seq[TokenLogprob], proposer: Proposer | None, now: float
    ) -> RowResult:
        """Write the accepted tokens into the sequence."""
        sequence, tree, path = window.sequence, window.tree, verdict.path
        before = sequence.output_length
        text = self._append(sequence, _tokens(window, verdict))
        emitted = sequence.output_length - before
        _count(window, verdict, emitted, proposer, now)
        sequence.logprobs += logprobs[:emitted]
        if proposer is not None:
            proposer.committed(sequence, tree, path)
        self.roster.deltas.append(delta(sequence, before, text))
        return _result(window, len(path), emitted)

    def _keep_path(self, window: Window, path: tuple[int, ...], device: torch.device) -> None:
        """The root and the accepted nodes stay in the cache, in order, from the sequence's length on.

        Only nodes that stand further back are moved: path (0, 1, 5) moves one place.
        """
        sequence, tree = window.sequence, window.tree
        slot, start = sequence.held_slot, sequence.computed
        right = next((place for place, node in enumerate(path) if node != place), len(path))
        if right < len(path):
            places = to_device([start + 1 + node for node in path[right:]], device)
            self.cache.gather(slot, places, start + 1 + right)
        self.roster.pool.record(slot, [sequence.tokens[-1], *(tree.tokens[node] for node in path)], start)
        sequence.computed = start + 1 + len(path)

    def _append(self, sequence: Sequence, tokens: Seq[int]) -> str:
        """Add tokens until one ends the answer; the text they made certain."""
        text, pieces = self.roster.texts[sequence.id], []
        for token in tokens:
            sequence.tokens.append(token)
            if token in sequence.stop_ids:
                sequence.finish_reason, sequence.stop_reason = "stop", token
            else:
                pieces.append(text.add(token, may_stop=sequence.output_length >= sequence.params.min_tokens))
                if text.stopped_by is not None:
                    sequence.finish_reason, sequence.stop_reason = "stop", text.stopped_by
            if sequence.finish_reason is None and sequence.room <= 0:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                pieces.append(text.flush())
                break
        return "".join(pieces)


def _result(window: Window, accepted: int, emitted: int) -> RowResult:
    sequence, tree = window.sequence, window.tree
    levels = None if tree.is_chain else max(tree.depths)
    return RowResult(
        sequence.id, len(tree), accepted, emitted, domain=sequence.request.domain, source=tree.source, levels=levels
    )


def _tokens(window: Window, verdict: Verdict) -> list[int]:
    return [*(window.tree.tokens[node] for node in verdict.path), verdict.next_token]


def _judging_rows(windows: Seq[Window], judgements: Seq[Judgement]) -> list[list[int]]:
    """The rows of logits that each verdict's tokens were judged by; none where there is no verdict."""
    found, first = [], 0
    for window, judgement in zip(windows, judgements, strict=True):
        path = None if judgement.verdict is None else judgement.verdict.path
        found.append([] if path is None else [first, *(first + 1 + node for node in path)])
        first += 1 + len(window.tree)
    return found


def _logprobs(
    windows: Seq[Window], judgements: Seq[Judgement], rows: Seq[Seq[int]], logits: Tensor
) -> dict[int, list[TokenLogprob]]:
    """Log-probabilities of the verdicts' tokens, by the places of the windows that ask for them; one read for all."""
    asking = {
        place: (_tokens(window, judgement.verdict), window.sequence.params.logprobs)
        for place, (window, judgement) in enumerate(zip(windows, judgements, strict=True))
        if judgement.verdict is not None and window.sequence.params.logprobs is not None
    }
    if not asking:
        return {}
    chosen = rows_of(logits, [row for place in asking for row in rows[place]])
    tokens = [token for own, _ in asking.values() for token in own]
    found = iter(token_logprobs(chosen, tokens, [best for own, best in asking.values() for _ in own]))
    return {place: list(islice(found, len(own))) for place, (own, _) in asking.items()}


def _count(window: Window, verdict: Verdict, emitted: int, proposer: Proposer | None, now: float) -> None:
    stats = window.sequence.stats
    stats.steps += 1
    if stats.first_token_s is None:
        stats.first_token_s = now
    if len(window.tree):
        stats.record_verification(max(window.tree.depths), len(verdict.path), emitted)
        version = proposer.version if proposer is not None and window.tree.source == "draft" else ""
        if version and version not in stats.draft_versions:
            stats.draft_versions.append(version)
