"""Rejection sampling of many chains side by side: without device reads or, where reads are free, level by level.

A drafted token is accepted with probability min(1, p(x) / q(x)) if those before it were. The next token is drawn from
norm(max(0, p − q)) after a rejection, from p after a whole chain. `verify_tree` is the readable reference, and a test
holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from distillspec.rejection_sampling import accepts
from distillspec.sampling import draw_unchecked, policy_probs
from distillspec.serving.base.transfer import rows_of, to_device, to_host
from distillspec.serving.base.tree import TokenTree
from distillspec.types import SamplingPolicy


@dataclass(frozen=True)
class AlikeChains:
    """Chains that were drawn from distributions over the same columns."""

    members: Tensor  # [m] int64, rows of the chains
    starts: Tensor  # [m] int64, the first row in `probs` of each
    probs: Tensor  # [Σ lengths, width]
    kept_ids: Tensor | None
    draft_at: Tensor  # [m, K] q(x) of the drafted tokens, 1 past a chain's end

    def take_away(self, last: Tensor, count: Tensor, rejected: Tensor, sync: bool) -> None:
        """Turn p into max(0, p − q) in place, in the rejected rows among `last [B, V]`.

        Where nothing is left, p = q up to rounding, and q stands for p.
        """
        q = self.probs.index_select(0, (self.starts + count[self.members]).clamp(max=len(self.probs) - 1)).to(last)
        q.mul_(rejected[self.members][:, None])
        own = last if len(self.members) == len(last) else last.index_select(0, self.members)
        part = own if self.kept_ids is None else own.index_select(1, self.kept_ids)
        part.sub_(q).clamp_(min=0)
        self._write(own, part)
        left = own.sum(-1, keepdim=True) > 0
        if not (sync and bool(left.all())):
            part.add_(q.mul_(~left))
            self._write(own, part)
        if own is not last:
            last.index_copy_(0, self.members, own)

    def _write(self, own: Tensor, part: Tensor) -> None:
        if self.kept_ids is not None:
            own.scatter_(1, self.kept_ids.expand(len(own), -1), part)


class Chains:
    """B chains of up to K drafted tokens, and the places of their rows in the step's logits."""

    def __init__(self, trees: Sequence[TokenTree], device: torch.device) -> None:
        self.trees, self.device = trees, device
        self.counts = [len(tree) for tree in trees]
        self.longest = max(self.counts)
        self.starts_of_windows = list(accumulate((1 + count for count in self.counts[:-1]), initial=0))
        padded = [
            [*tree.tokens, *[0] * (self.longest - count), count, first]
            for tree, count, first in zip(trees, self.counts, self.starts_of_windows, strict=True)
        ]
        held = to_device(padded, device)
        self.tokens, self.lengths, self.firsts = held[:, : self.longest], held[:, -2], held[:, -1]
        self.lots = [self._lot(members) for members in self._alike()]
        self.one_hot = any(tree.draft_probs is None and len(tree) for tree in trees)

    def draft_at(self) -> Tensor:
        """Return q(x) of every drafted token `[B, K]` float32, 1 for deterministic proposers and past a chain's end."""
        found = torch.ones(self.tokens.shape, device=self.device)
        for lot in self.lots:
            found[lot.members] = lot.draft_at
        return found

    def accept(self, logits: Tensor, policy: SamplingPolicy, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Decide all levels at once, without a device read.

        Returns:
            Accepted tokens `[B]` int64, and p after the last of them `[B, V]`.
        """
        probs = policy_probs(logits, policy, sync=False)
        level = torch.arange(self.longest, device=self.device)
        rows = self.firsts[:, None] + torch.minimum(level, self.lengths[:, None])
        accepted = accepts(probs[rows, self.tokens], self.draft_at(), uniforms) & (level < self.lengths[:, None])
        count = accepted.long().cumprod(1).sum(1)
        return count, probs[self.firsts + count]

    def accept_by_level(self, logits: Tensor, policy: SamplingPolicy, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Decide level by level, with a device read after each. Gives what `accept` gives.

        Rows of logits behind a rejection are never turned into probabilities, which saves most of the work on CPUs.
        """
        draft_at = self.draft_at()
        counts = [0] * len(self.counts)
        alive = list(range(len(counts)))
        last = policy_probs(rows_of(logits, self.starts_of_windows), policy)
        probs = last
        for level in range(self.longest):
            drafting = [b for b in alive if self.counts[b] > level]
            if not drafting:
                break
            target_at = probs[[alive.index(b) for b in drafting], self.tokens[drafting, level]]
            accepted = to_host(accepts(target_at, draft_at[drafting, level], uniforms[drafting, level])).tolist()
            alive = [b for b, yes in zip(drafting, accepted, strict=True) if yes]
            if not alive:
                break
            for b in alive:
                counts[b] = level + 1
            # `rows_of` copies whole rows. Indexing copies number by number, which took most of a verdict.
            probs = policy_probs(rows_of(logits, [self.starts_of_windows[b] + level + 1 for b in alive]), policy)
            last.index_copy_(0, to_device(alive, self.device), probs)
        return torch.tensor(counts, device=self.device), last

    def take_away_rejected(self, last: Tensor, count: Tensor, sync: bool = False) -> None:
        """Turn p `[B, V]` into the unnormalised residual where a drafted token was rejected, in place.

        Args:
            sync: whether a look at the device costs nothing and may save work.
        """
        rejected = count < self.lengths
        if self.one_hot:
            token = self.tokens.gather(1, count.clamp(max=self.longest - 1)[:, None])
            at = last.gather(1, token)
            last.scatter_(1, token, at.masked_fill(rejected[:, None], 0.0))
            nothing_left = last.sum(-1, keepdim=True) <= 0
            last.scatter_(1, token, at.masked_fill(rejected[:, None] & ~nothing_left, 0.0))
        for lot in self.lots:
            lot.take_away(last, count, rejected, sync)

    def _alike(self) -> list[list[int]]:
        """Group the sampled chains that are over the same columns."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, tree in enumerate(self.trees):
            if tree.draft_probs is not None and len(tree):
                found.setdefault((id(tree.kept_ids), tree.draft_probs.shape[-1]), []).append(place)
        return list(found.values())

    def _lot(self, members: Sequence[int]) -> AlikeChains:
        trees = [self.trees[b] for b in members]
        kept_ids = trees[0].kept_ids
        probs = torch.cat([tree.draft_probs[: len(tree)] for tree in trees if tree.draft_probs is not None])
        starts = list(accumulate((len(tree) for tree in trees[:-1]), initial=0))
        places = [(m, level) for m, tree in enumerate(trees) for level in range(len(tree))]
        member, level = to_device(list(zip(*places, strict=True)), self.device)
        at = to_device(list(members), self.device)
        tokens = self.tokens[at][member, level]
        columns = tokens if kept_ids is None else torch.searchsorted(kept_ids, tokens)
        draft_at = torch.ones(len(trees), self.longest, device=self.device)
        draft_at[member, level] = probs.gather(1, columns[:, None])[:, 0].float()
        return AlikeChains(at, to_device(starts, self.device), probs, kept_ids, draft_at)


def next_tokens(chains: Chains, last: Tensor, count: Tensor, uniforms: Tensor, sync: bool = False) -> Tensor:
    """Draw the target's own token `[B]` after the accepted ones. `last [B, V]`, p there, is used up."""
    chains.take_away_rejected(last, count, sync)
    return draw_unchecked(last, uniforms)
