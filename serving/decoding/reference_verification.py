"""Verification of one drafted token tree by rejection sampling: exact for every tree, as pure functions on tensors.

Leviathan et al. 2023; Chen et al. 2023; for trees SpecInfer (Miao et al. 2024), with draws without replacement as in
multi-candidate decoding (Yang et al. 2024). Children are tried in order, each accepted with probability
min(1, p(x) / q(x)). After a rejection p becomes norm(max(0, p − q)), and the q of the child's group loses the child and
is renormalised. When no child is accepted, the next token is drawn from what p has become.

This is the readable oracle. The engine runs `decoding.tree_rules`, and tests hold the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distillspec.rejection_sampling import accepts, residual_probs
from distillspec.sampling import draw
from distillspec.serving.base.tree import ROOT, SiblingGroup, TokenTree
from distillspec.serving.decoding.verdict import TreeVerdict


def verify_tree(target_probs: Tensor, tree: TokenTree, accept_uniforms: Tensor, next_uniform: Tensor) -> TreeVerdict:
    """Verify one tree.

    Args:
        target_probs: `[1 + n, V]` under the request's policy: row 0 follows the text, row 1 + i node i.
        tree: n nodes.
        accept_uniforms: `[n]` in [0, 1), one a node.
        next_uniform: `[]` in [0, 1), independent of proposals and acceptance.
    """
    path: list[int] = []
    while True:
        p = target_probs[1 + (path[-1] if path else ROOT)].double()
        accepted, p = _try_children(p, tree, path[-1] if path else ROOT, accept_uniforms)
        if accepted is None:
            return TreeVerdict(tuple(path), int(draw(p[None], next_uniform[None])[0]))
        path.append(accepted)


def _try_children(p: Tensor, tree: TokenTree, node: int, uniforms: Tensor) -> tuple[int | None, Tensor]:
    """Return the accepted child of a node, None if all are rejected, and what p has become."""
    for group in tree.groups_at(node):
        q = group_probs(group, p)
        for child in group.nodes:
            token = tree.tokens[child]
            draft_at = q[token] if q is not None else torch.ones(())  # deterministic: q is one-hot at the child
            if bool(accepts(p[token] / p.sum(), draft_at, uniforms[child])):
                return child, p
            p, q = after_rejection(p, q, token)
    return None, p


def group_probs(group: SiblingGroup, like: Tensor) -> Tensor | None:
    """Return the distribution `[V]` that a group was drawn from, None for a deterministic one."""
    if group.drawn_from is None:
        return None
    row, kept_ids = group.drawn_from.probs[group.row].to(like), group.drawn_from.kept_ids
    if kept_ids is None:
        return row / row.sum()
    return torch.zeros_like(like).index_copy_(0, kept_ids.to(like.device), row / row.sum())


def after_rejection(p: Tensor, q: Tensor | None, rejected: int) -> tuple[Tensor, Tensor | None]:
    """Return p and q after a rejection. q loses the rejected token: siblings are drawn without replacement."""
    if q is None:
        rest = p.clone()
        rest[rejected] = 0
        return (rest if bool(rest.sum() > 0) else p), None
    p = residual_probs(p / p.sum(), q)
    return p / p.sum(), without(q, rejected)


def without(q: Tensor | None, token: int) -> Tensor | None:
    """Return a group's distribution `[V]` without a token that is taken out, None for a deterministic group."""
    if q is None:
        return None
    q = q.clone()
    q[token] = 0
    return q / q.sum() if bool(q.sum() > 0) else q
