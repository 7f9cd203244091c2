"""Tokens and verdicts from logits, for rows of many requests with parameters of their own.

Greedy and seeded rows *choose*: the target's own token is a function of its logits (and of keyed noise), so a drafted
token is accepted if it is that token. The others draw by rejection sampling, or by a lossy rule that settings name.

A step's verdicts are launched together and read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.transfer import to_device, to_host
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.block_verification import verify_blocks
from distillspec.serving.decoding.drafting import Draws, make_draws, place_key
from distillspec.serving.decoding.logits import Columns, Place, needs_transform, transform
from distillspec.serving.decoding.noise import hashed_ids, key_tensor
from distillspec.serving.decoding.row_kinds import Kind, by_kind
from distillspec.serving.decoding.row_values import Compute, Values, greedy_ids, row_probs, seeded_ids, values_at
from distillspec.serving.decoding.target_initialised import CandidatesRule, decided, verify_from_roots
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.tree_rules import ChoiceRule, RejectionRule, Rule
from distillspec.serving.decoding.typical import TypicalRule
from distillspec.serving.decoding.verification import TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts, Start, verify
from distillspec.types import SamplingPolicy


@dataclass(frozen=True)
class VerificationWindow:
    """One sequence and what was drafted for it: 1 + len(tree) rows of the target's logits."""

    sequence: SequenceState
    tree: TokenTree

    def places(self) -> list[Place]:
        tokens = self.tree.tokens
        return [
            Place(self.sequence, tuple(tokens[n] for n in self.tree.path(node))) for node in range(ROOT, len(tokens))
        ]


@dataclass(frozen=True)
class _Lot:
    """Rows of one kind: the windows `members` of a step, with all its trees and logits."""

    kind: Kind
    members: Sequence[int]
    batch: TreeBatch
    windows: Sequence[VerificationWindow]
    logits: Tensor


@dataclass(frozen=True)
class Judgement:
    """Verdict on a window."""

    verdict: TreeVerdict | None  # None where the target's logits on the path are NaN
    sound: bool  # False where any of the window's logits is NaN, on the path or off it


class TokenSampler:
    """Judges windows, and makes drafts' draws. Proposal, acceptance and residual draws have streams of their own.

    Args:
        look: whether reading a number from the device costs nothing; None: on CPUs it does not. Without looks every
            position of a window is computed, and a step's verdicts are one read.
        verification: `EngineConfig.verification`.
        roots: candidates for the next token, with `target_initialised`.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        seed: int = 0,
        *,
        look: bool | None = None,
        verification: str = "exact",
        roots: int = 1,
    ) -> None:
        self.look = device.type == "cpu" if look is None else look
        self.verification, self.roots = verification, roots
        self.columns = Columns(vocab_size)
        self.device = device
        self._hashed = hashed_ids(torch.arange(vocab_size, device=device))
        self._propose, self._accept, self._residual = (torch.Generator().manual_seed(3 * seed + i) for i in range(3))

    def draws(
        self, places: Sequence[Place], count: int, columns: Columns, siblings: int = 1, *, best: bool = False
    ) -> Draws:
        """Return what a draft on `columns` chooses the next `count` tokens after `places` by, each with siblings.

        Args:
            best: choose the most probable tokens where others would be drawn.
        """
        drawn = any(not place.sequence.params.is_greedy for place in places)
        rows = len(places) if drawn else 0
        uniforms = torch.rand(rows, count, siblings, generator=self._propose, dtype=torch.float64)
        return make_draws(places, columns, count, to_device(uniforms, self.device), best=best)

    def verify(self, logits: Tensor, windows: Sequence[VerificationWindow]) -> list[Judgement]:
        """A judgement of each window.

        `logits [Σ (1 + len(tree)), V]` of any float dtype, window by window, the row after the text first.
        """
        if any(needs_transform(window.sequence) for window in windows):
            logits = _transformed(logits, [place for window in windows for place in window.places()], self.columns)
        logits, finite = self._made_finite(logits)
        batch = TreeBatch([window.tree for window in windows], logits.device)
        lots = by_kind([window.sequence for window in windows], batch.trees, self.verification)
        asked = [
            (members, self._verdicts(_Lot(kind, members, batch, windows, logits))) for kind, members in lots.items()
        ]
        numbers = to_host(torch.cat([finite.long(), *(pending.numbers for _, pending in asked)])).tolist()
        return _judgements(windows, batch, asked, numbers)

    def _verdicts(self, lot: _Lot) -> PendingVerdicts:
        """Launch the verdicts of the rows of one kind."""
        batch, members = lot.batch, lot.members
        if lot.kind == "decided":
            return decided([lot.windows[member].sequence for member in members], batch.device)
        if lot.kind == "block":
            accept = self.uniforms(self._accept, (batch.rows,), lot.logits)
            own = self.uniforms(self._residual, (len(members),), lot.logits)
            return verify_blocks(batch, members, self._probs(lot), accept, own)
        rule = self._rule(lot)
        if lot.kind == "rooted":
            return verify_from_roots(batch, members, rule, self.look)
        starts = [Start(batch.firsts[member], batch.firsts[member]) for member in members]
        return verify(batch, starts, rule, self.look)

    def _rule(self, lot: _Lot) -> Rule:
        """Return the rule that accepts the children of a lot's nodes."""
        batch, members, logits = lot.batch, lot.members, lot.logits
        rows = [row for m in members for row in range(batch.firsts[m], batch.firsts[m] + 1 + len(batch.trees[m]))]

        def values(compute: Compute, as_visited: bool = self.look) -> Values:
            return values_at(compute, rows, batch.rows, logits.device, as_visited)

        if lot.kind == "greedy":  # all maxima at once cost less than a few at a time
            return ChoiceRule(batch, values(greedy_ids(logits), as_visited=False))
        probs = self._probs(lot)
        if lot.kind == "seeded":
            keys = key_tensor(place_key(place) for window in lot.windows for place in window.places())
            return ChoiceRule(batch, values(seeded_ids(probs, keys, self._hashed)))
        if lot.kind == "typical":
            return TypicalRule(batch, values(probs), self.uniforms(self._residual, (len(members),), logits))
        accept = self.uniforms(self._accept, (batch.rows,), logits)
        if lot.kind == "drawn":
            own = self.uniforms(self._residual, (len(members),), logits)
            return RejectionRule(batch, values(probs), accept, own, self.look)
        starts = sum([max(1, len(batch.trees[member].roots)) for member in members])
        own = self.uniforms(self._residual, (starts, self.roots), logits)
        return CandidatesRule(batch, values(probs), accept, own, self.look)

    def _probs(self, lot: _Lot) -> Compute:
        return row_probs(lot.logits, policies_of(lot.windows), self.look)

    def _made_finite(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Set rows that define no distribution (NaN, +inf, −inf alone) to zero. Return `[N]` bool, True for sound rows.

        Where device reads are not free the rows stay, and their verdicts are dropped later.
        """
        finite = torch.isfinite(logits.amax(-1))
        if self.look and not bool(finite.all()):
            logits = logits.masked_fill(~finite[:, None], 0.0)
        return logits, finite

    @staticmethod
    def uniforms(stream: torch.Generator, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw float64 in [0, 1) from a stream on the host, onto the device of `like`."""
        return to_device(torch.rand(shape, generator=stream, dtype=torch.float64), like.device)


def _judgements(
    windows: Sequence[VerificationWindow],
    batch: TreeBatch,
    asked: Sequence[tuple[list[int], PendingVerdicts]],
    numbers: list[int],
) -> list[Judgement]:
    """Return the judgements, from what was read. Verdicts that depend on rows with NaN become None.

    Args:
        numbers: 1 for each sound row of logits, 0 for others. Then the numbers of `asked`.
    """
    finite, numbers = numbers[: batch.rows], numbers[batch.rows :]
    found: dict[int, TreeVerdict] = {}
    for members, pending in asked:
        own, numbers = numbers[: len(pending.numbers)], numbers[len(pending.numbers) :]
        found.update(zip(members, pending.verdicts(own), strict=True))
    judgements = []
    for i, (first, window) in enumerate(zip(batch.firsts, windows, strict=True)):
        rows = finite[first : first + 1 + len(window.tree)]
        decided = rows[0] and all(rows[1 + node] for node in found[i].path)
        judgements.append(Judgement(found[i] if decided else None, all(rows)))
    return judgements


def policies_of(windows: Sequence[VerificationWindow]) -> list[SamplingPolicy]:
    """Return the policy of each row of logits."""
    return [window.sequence.params.policy for window in windows for _ in range(1 + len(window.tree))]


def _transformed(logits: Tensor, places: Sequence[Place], columns: Columns) -> Tensor:
    logits = logits.to(torch.float32, copy=True)
    transform(logits, places, columns)
    return logits
