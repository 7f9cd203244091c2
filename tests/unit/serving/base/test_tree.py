"""Token trees: shape, depth, and shortening."""

from __future__ import annotations

import pytest
import torch

from distillspec.serving.base.tree import ROOT, TokenTree


def test_a_tree_knows_its_shape() -> None:
    tree = TokenTree((4, 7, 5, 6, 9), (ROOT, ROOT, 1, 1, 3))
    assert tree.children == {ROOT: (0, 1), 1: (2, 3), 3: (4,)}
    assert tree.depths == (1, 1, 2, 2, 3)
    assert tree.depth == 3
    assert tree.path(4) == (1, 3, 4)
    assert not tree.is_chain
    assert TokenTree.chain([1, 2, 3]).is_chain
    with pytest.raises(ValueError, match="node 0 has parent 1"):
        TokenTree((1, 2), (1, ROOT))


def test_a_shortened_tree_keeps_what_was_drawn() -> None:
    probs = torch.rand(3, 8)
    tree = TokenTree((4, 7, 5, 6, 2), (ROOT, 0, ROOT, 2, 1), "sampled", probs, {ROOT: 0, 0: 1, 2: 2})
    short = tree.shortened(1)
    assert (short.tokens, short.parents) == ((4, 5), (ROOT, ROOT))
    assert short.rows == {ROOT: 0, 0: 1, 1: 2}
    assert tree.shortened(3) is tree
    assert len(tree.shortened(0)) == 0


@pytest.mark.parametrize(
    ("path", "depth"),
    [((), 1), ((0,), 1), ((1,), 2), ((1, 2), 2), ((1, 3), 3), ((1, 3, 4), 3)],
)
def test_a_path_could_have_been_longer_only_where_its_last_node_has_children(path: tuple[int, ...], depth: int) -> None:
    assert TokenTree((4, 7, 5, 6, 9), (ROOT, ROOT, 1, 1, 3)).depth_along(path) == depth


def test_nothing_can_be_accepted_of_an_empty_tree() -> None:
    assert (TokenTree().depth, TokenTree().depth_along(())) == (0, 0)
