"""Trees of a proposer that names the tokens behind any path, the best first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import ROOT, TokenTree, path_to


def tree_of_shape(
    shape: TreeShape, behind: Callable[[Sequence[int]], Sequence[int]], stop_ids: Collection[int], source: str
) -> TokenTree:
    """Return the tree of a shape, one-hot, without the nodes that have no token.

    Args:
        behind: returns what may follow the text and these drafted tokens, the best first.
        stop_ids: tokens that end the answer. They have no children.
    """
    tokens, parents = list[int](), list[int]()
    above: list[int | None] = [ROOT]
    for level in shape.levels:
        below: list[int | None] = []
        for node, count in zip(above, level, strict=True):
            found: Sequence[int] = ()
            if count and node is not None and (node == ROOT or tokens[node] not in stop_ids):
                found = behind([tokens[each] for each in path_to(node, parents)])[:count]
            below += [*range(len(tokens), len(tokens) + len(found)), *[None] * (count - len(found))]
            tokens += found
            parents += [ROOT if node is None else node] * len(found)
        above = below
    return TokenTree.of_parents(tokens, parents, source).first_path_first()
