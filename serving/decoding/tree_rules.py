"""The two rules by which drafted children are accepted, over many trees at once and without a device read.

*Choice*: the target's own token is known at every node (greedy, or keyed noise of seeded requests), and the first child
that is this token is accepted. *Rejection*: see `decoding.reference_verification`.

A rule computes a value for each node that is visited: the target's token, or its distribution p.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distillspec.rejection_sampling import accepts
from distillspec.sampling import draw_unchecked
from distillspec.serving.decoding.row_values import Values
from distillspec.serving.decoding.tree_batch import NO_NODE, NO_TOKEN, TreeBatch


class Rule(Protocol):
    """Accepts children of nodes, all given by their rows in the step's logits."""

    def values(self, at: Tensor) -> Tensor:
        """Return what decides at the nodes `at [m]` int64: `[m]` or `[m, V]`."""
        ...

    def accepted(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        """Return the accepted child `[m]` int64 of each node, −1 where none is. `values` stay as they are.

        Args:
            values: those of the nodes `at [m]`.
            widest: the most children of any of them.
        """
        ...

    def next_tokens(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        """Return the target's own token `[B]` after nodes of which no child was accepted. May change `values`.

        `[B, W]`: W candidates for it, −1 where there are fewer.
        """
        ...


class ChoiceRule:
    """Accepts the child that is the target's own token, given by `choose` for rows of logits."""

    def __init__(self, batch: TreeBatch, choose: Values) -> None:
        self.batch = batch
        self.values = choose

    def accepted(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        children = self.batch.children[at, :widest]
        return first_child(children, self.batch.tokens[children] == values[:, None])

    def next_tokens(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        return values


class RejectionRule:
    """Accepts by rejection sampling.

    Args:
        batch: trees of several rows.
        probs: returns p `[m, V]` float32 at rows of logits.
        accept_uniforms: `[N]` float64 in [0, 1), one a row.
        next_uniforms: `[B]` float64 in [0, 1), for the target's own tokens.
        reads_are_free: a device read costs nothing, and may save work.
    """

    def __init__(
        self, batch: TreeBatch, probs: Values, accept_uniforms: Tensor, next_uniforms: Tensor, reads_are_free: bool
    ) -> None:
        self.batch = batch
        self.values = probs
        self.accept_uniforms = accept_uniforms
        self.next_uniforms = next_uniforms
        self.reads_are_free = reads_are_free

    def accepted(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        accepted = torch.full_like(at, NO_NODE)
        p = values
        for rank in range(widest):
            child = self.batch.children[at, rank]
            tried = (child >= 0) & (accepted < 0)
            target_at = p.gather(1, self.batch.tokens[child][:, None])[:, 0]
            yes = tried & accepts(target_at, self._draft_at(child, rank), self.accept_uniforms[child])
            accepted = torch.where(yes, child, accepted)
            if not self._some(tried & ~yes):
                return accepted
            if rank + 1 < widest:
                p = self.normalised(self.residual(p.clone() if rank == 0 else p, child, tried & ~yes, rank))
        return accepted

    def next_tokens(self, values: Tensor, at: Tensor, widest: int) -> Tensor:
        p = values
        for rank in range(widest):
            child = self.batch.children[at, rank]
            p = self.residual(p, child, child >= 0, rank)
            if rank + 1 < widest:
                p = self.normalised(p)
        return self.drawn(p)

    def drawn(self, p: Tensor) -> Tensor:
        """Draw the target's own tokens from `p [B, V]`."""
        return draw_unchecked(p, self.next_uniforms)

    def _draft_at(self, child: Tensor, rank: int) -> Tensor:
        """Return q(x) `[m]` float32 of the children, 1 for deterministic ones."""
        draft_at = torch.ones(child.shape, device=child.device)
        tokens = self.batch.tokens[child]
        for drawn in self.batch.drawn:
            if rank == 0:
                q = drawn.probs_at(child, tokens)
            else:
                q = drawn.probs_of(child, self.elder(child, rank)).gather(1, drawn.columns(tokens)[:, None])[:, 0]
            draft_at = torch.where(drawn.rows[child] >= 0, q, draft_at)
        return draft_at

    def residual(self, p: Tensor, child: Tensor, rejected: Tensor, rank: int) -> Tensor:
        """Turn p `[m, V]` into max(0, p − q) where `child` was rejected, in place.

        Where rounding leaves no mass, p = q up to rounding, and p stays.
        """
        deterministic = rejected.clone()
        for drawn in self.batch.drawn:
            deterministic &= drawn.rows[child] < 0
            q = drawn.probs_of(child, self.elder(child, rank)).masked_fill_(~rejected[:, None], 0.0)
            self.subtract(p, q, drawn.kept_ids)
        if self._some(deterministic):
            at = self.batch.tokens[child][:, None]
            before = p.gather(1, at)
            p.scatter_(1, at, before.masked_fill(deterministic[:, None], 0.0))
            emptied = deterministic[:, None] & (p.sum(-1, keepdim=True) <= 0)
            p.scatter_(1, at, torch.where(emptied, before, p.gather(1, at)))
        return p

    def subtract(self, p: Tensor, q: Tensor, kept_ids: Tensor | None) -> None:
        part = p if kept_ids is None else p.index_select(1, kept_ids)
        part.sub_(q).clamp_(min=0)
        _write(p, part, kept_ids)
        emptied = p.sum(-1, keepdim=True) <= 0
        if self._some(emptied):
            part.add_(q.masked_fill_(~emptied, 0.0))
            _write(p, part, kept_ids)

    def _some(self, mask: Tensor) -> bool:
        """Return False only if a device read shows that there are none."""
        return not self.reads_are_free or bool(mask.any())

    def elder(self, child: Tensor, rank: int) -> Tensor | None:
        """Return the tokens `[m, rank]` of earlier siblings in the group, −1 where there are fewer."""
        if rank == 0:
            return None
        elder = self.batch.elder[child, :rank]
        return torch.where(elder >= 0, self.batch.tokens[elder], NO_TOKEN)

    @staticmethod
    def normalised(p: Tensor) -> Tensor:
        return p.div_(p.sum(-1, keepdim=True))


def first_child(children: Tensor, accepted: Tensor) -> Tensor:
    """Return the first accepted child of each node `[m]`, −1 for none.

    Args:
        children: `[m, S]`, −1 where there is no further one.
        accepted: `[m, S]` bool. Its values at missing children mean nothing.
    """
    accepted = accepted & (children >= 0)
    first = accepted.byte().argmax(-1, keepdim=True)
    return torch.where(accepted.any(-1), children.gather(1, first)[:, 0], NO_NODE)


def _write(p: Tensor, part: Tensor, kept_ids: Tensor | None) -> None:
    if kept_ids is not None:
        p.scatter_(1, kept_ids.expand(len(p), -1), part)
