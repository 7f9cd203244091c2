"""Verification of drafted token trees: exact for every tree, as pure functions on tensors.

Two rules. *Rejection* (Leviathan et al. 2023; Chen et al. 2023; for trees SpecInfer, Miao et al. 2024, with draws
without replacement as in multi-candidate decoding, Yang et al. 2024): children are tried in draw order, each accepted
with probability min(1, p(x) / q(x)). After a rejection p becomes norm(max(0, p − q)), and q loses the child and is
renormalised. When no child is accepted, the next token is drawn from what p has become. *Choice*: the target's own
token is known at every node (greedy, or coupled noise for seeded requests), and a child is accepted if it is that
token.

`verify_tree` is the readable reference for any shape. `TokenSampler` judges many chains at once and reads only what it
needs of the target's logits. The two are kept apart on purpose: a test holds the fast one to the readable one.
Residual and bonus draws take uniforms of their own: they must not depend on what decided acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.rejection_sampling import accepts, residual_probs
from distillspec.sampling import draw
from distillspec.serving.base.tree import ROOT, TokenTree


class TreeVerdict(NamedTuple):
    """The accepted nodes, root to leaf, and the token of the target's own that follows them."""

    path: tuple[int, ...]
    next_token: int


def verify_tree(target_probs: Tensor, tree: TokenTree, accept_uniforms: Tensor, next_uniform: Tensor) -> TreeVerdict:
    """Verify one tree by rejection sampling. The readable oracle of `decoding.chains`, kept apart on purpose.

    Args:
        target_probs: `[1 + n, V]` float32 under the request's policy: row 0 follows the text, row 1 + i node i.
        tree: n nodes, `sampled` or `one_hot`.
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
                accepted = bool(accepts(p[token], p.sum(), accept_uniforms[child]))
            else:
                accepted = bool(accepts(p[token] / p.sum(), q[token], accept_uniforms[child]))
            if accepted:
                path.append(child)
                break
            p, q = after_rejection(p, q, token)
        else:
            return TreeVerdict(tuple(path), int(draw(p[None], next_uniform[None])[0]))
        node = path[-1]


def verify_choices(choice: Callable[[int], int], tree: TokenTree) -> TreeVerdict:
    """Verify one tree by the target's own tokens: a child is accepted if it equals the token.

    Args:
        choice: returns the target's token at a row of the window: 0 follows the text, 1 + i node i. Called only along
            the accepted path.
    """
    node = ROOT
    path: list[int] = []
    while True:
        token = choice(1 + node)
        match = next((child for child in tree.children.get(node, ()) if tree.tokens[child] == token), None)
        if match is None:
            return TreeVerdict(tuple(path), token)
        path.append(match)
        node = match


def verify_by_level(
    choices: Callable[[list[int]], list[int]], trees: Sequence[TokenTree], firsts: Sequence[int]
) -> list[TreeVerdict]:
    """Verify many trees as `verify_choices` does each, all of them one level further at a time.

    Args:
        choices: returns the target's tokens at some rows. Called once a level, for the trees still on their way.
        firsts: the row that follows the text, of each tree.
    """
    paths: list[list[int]] = [[] for _ in trees]
    tokens = [0] * len(trees)
    alive = list(range(len(trees)))
    while alive:
        nodes = [paths[t][-1] if paths[t] else ROOT for t in alive]
        goes_on = []
        for t, node, token in zip(
            alive, nodes, choices([firsts[t] + 1 + n for t, n in zip(alive, nodes, strict=True)]), strict=True
        ):
            tokens[t] = token
            match = next((child for child in trees[t].children.get(node, ()) if trees[t].tokens[child] == token), None)
            if match is not None:
                paths[t].append(match)
                goes_on.append(t)
        alive = goes_on
    return [TreeVerdict(tuple(path), token) for path, token in zip(paths, tokens, strict=True)]


def _node_draft_probs(tree: TokenTree, node: int, like: Tensor) -> Tensor | None:
    """Return the draft's distribution at a node `[V]` float64, None for a deterministic proposer."""
    if tree.kind == "one_hot" or tree.rows is None or node not in tree.rows:
        return None
    assert tree.draft_probs is not None
    row = tree.draft_probs[tree.rows[node]].to(like)
    if tree.kept_ids is None:
        return row / row.sum()
    return torch.zeros_like(like).index_copy_(0, tree.kept_ids.to(like.device), row / row.sum())


def after_rejection(p: Tensor, q: Tensor | None, rejected: int) -> tuple[Tensor, Tensor | None]:
    """Return p and q after a rejection. q loses the rejected token: siblings are drawn without replacement."""
    if q is None:
        rest = p.clone()
        rest[rejected] = 0
        return (rest if bool(rest.sum() > 0) else p), None
    p = residual_probs(p / p.sum(), q)
    q = q.clone()
    q[rejected] = 0
    return p / p.sum(), (q / q.sum() if bool(q.sum() > 0) else q)
