"""Trees that start with several tokens of the target's own (multi-candidate decoding, Yang et al. 2024): lossy.

A step draws W candidates for the next token, without replacement, and emits none of them. They are the first level of
the next step's tree. Behind each one drafted tokens are verified exactly, and the candidate with the longest accepted
path becomes text. What it was chosen by is not the target's: that is the loss. The first of equals is taken, so that
W = 1, or no drafted token accepted, gives an exact draw.

The newest token is read again at the next step, since no newer one is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.decoding.drafting import drawn_in_order
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.tree_rules import RejectionRule, Rule
from distillspec.serving.decoding.verdict import TreeVerdict
from distillspec.serving.decoding.verifier import PendingVerdicts, Start, Verify


class CandidatesRule(RejectionRule):
    """Accepts by rejection sampling, then draws W tokens of the target's own. `next_uniforms`: `[B, W]` in [0, 1)."""

    def drawn(self, p: Tensor) -> Tensor:
        return drawn_in_order(p, self.next_uniforms)


def verify_from_roots(batch: TreeBatch, members: Sequence[int], rule: Rule, verify: Verify) -> PendingVerdicts:
    """Verify the trees `members` behind each of their roots, and take the longest path of each tree."""
    roots = [(member, root) for member in members for root in batch.trees[member].roots]
    starts = [Start(batch.firsts[member] + 1 + root, batch.firsts[member]) for member, root in roots]
    pending = verify(batch, starts, rule)

    def verdicts(read: list[int]) -> list[TreeVerdict]:
        longest: dict[int, TreeVerdict] = {}
        for (member, root), verdict in zip(roots, pending.verdicts(read), strict=True):
            if member not in longest or len(verdict.path) + 1 > len(longest[member].path):
                longest[member] = verdict._replace(path=(root, *verdict.path))
        return [longest[member] for member in members]

    return PendingVerdicts(pending.numbers, verdicts)


def decided(sequences: Sequence[SequenceState], device: torch.device) -> PendingVerdicts:
    """Return the verdicts of rows that draft nothing: their first candidates, which are exact draws."""
    verdicts = [TreeVerdict((), sequence.candidates[0]) for sequence in sequences]
    return PendingVerdicts(torch.empty(0, dtype=torch.int64, device=device), lambda _: verdicts)
