"""Which drafted tokens stand: exact for every tree, as pure functions on tensors.

Two rules. *Rejection* (Leviathan et al. 2023; Chen et al. 2023; for trees SpecInfer, Miao et al. 2024, with draws
without replacement as in multi-candidate decoding, Yang et al. 2024): children are tried in draw order, each accepted
with probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(0, p − q)) and q loses the child and is
renormalised; when none stands, the next token is drawn from what p has become. *Choice*: the target's own token is
known at every node (greedy, or coupled noise for seeded requests), and a child stands when it is that token.

`verify_tree` is the readable reference for any shape. `TokenSampler` judges many chains at once, reading only what it
needs of the target's logits; a test holds the two together. Residual and bonus draws take uniforms of their own: they
must not depend on what decided acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.sampling import draw
from distillspec.serving.tree import ROOT, TokenTree


class Verdict(NamedTuple):
    """The accepted nodes, root to leaf, and the token of the target's own that follows them."""

    path: tuple[int, ...]
    next_token: int


def verify_tree(target_probs: Tensor, tree: TokenTree, accept_uniforms: Tensor, next_uniform: Tensor) -> Verdict:
    """Rejection sampling down one tree.

    Args:
        target_probs: `[1 + n, V]` float32 under the request's policy: row 0 follows the text, row 1 + i node i.
        tree: n nodes; `sampled` or `one_hot`.
        accept_uniforms: `[n]` in [0, 1), one a node.
        next_uniform: `[]` in [0, 1), independent of proposals and acceptance.
    """
    node = ROOT
    path: list[int] = []
    while True:
        p = target_probs[1 + node].double()
        q = _node_draft_probs(tree, node, p)
        for child in tree.children.get(node, ()):
            token = tree.tokens[child]
            if q is None:  # deterministic: q is one-hot at the child
                stands = bool(accepts(p[token], p.sum(), accept_uniforms[child]))
            else:
                stands = bool(accepts(p[token] / p.sum(), q[token], accept_uniforms[child]))
            if stands:
                path.append(child)
                break
            p, q = _residual(p, q, token)
        else:
            return Verdict(tuple(path), int(draw(p[None], next_uniform[None])[0]))
        node = path[-1]


def verify_choices(choice: Callable[[int], int], tree: TokenTree) -> Verdict:
    """Children stand while they equal the target's own token.

    `choice(row)` is the target's token at a row of the window: 0 follows the text, 1 + i node i. Asked only along the
    path.
    """
    node = ROOT
    path: list[int] = []
    while True:
        wanted = choice(1 + node)
        match = next((child for child in tree.children.get(node, ()) if tree.tokens[child] == wanted), None)
        if match is None:
            return Verdict(tuple(path), wanted)
        path.append(match)
        node = match


def accepts(target_at: Tensor, draft_at: Tensor, uniforms: Tensor) -> Tensor:
    """Whether drafted tokens stand, bool: u · q(x) < p(x) for u in [0, 1); q(x) = 1 for deterministic proposers."""
    return uniforms * draft_at < target_at


def residual_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Unnormalised max(0, p − q) `[..., V]`; p itself where rounding leaves nothing."""
    residual = (target_probs - draft_probs).clamp(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)


def _node_draft_probs(tree: TokenTree, node: int, like: Tensor) -> Tensor | None:
    """The draft's distribution at a node over the whole vocabulary, float64; None for a deterministic proposer."""
    if tree.kind == "one_hot" or tree.rows is None or node not in tree.rows:
        return None
    assert tree.draft_probs is not None
    row = tree.draft_probs[tree.rows[node]].to(like)
    if tree.kept_ids is None:
        return row / row.sum()
    return torch.zeros_like(like).index_copy_(0, tree.kept_ids.to(like.device), row / row.sum())


def _residual(p: Tensor, q: Tensor | None, rejected: int) -> tuple[Tensor, Tensor | None]:
    """p and q after `rejected` fell; q has lost it, for siblings are drawn without replacement."""
    if q is None:
        rest = p.clone()
        rest[rejected] = 0
        return (rest if bool(rest.sum() > 0) else p), None
    p = residual_probs(p / p.sum(), q)
    q = q.clone()
    q[rejected] = 0
    return p / p.sum(), (q / q.sum() if bool(q.sum() > 0) else q)
