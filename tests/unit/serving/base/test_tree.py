"""Token trees: shape, groups of siblings, and shortening."""

from __future__ import annotations

import pytest
import torch

from distillspec.serving.base.tree import LOOKUP, ROOT, DraftProbs, SiblingGroup, TokenTree


def test_a_tree_knows_its_shape() -> None:
    tree = TokenTree.of_parents((4, 7, 5, 6, 9), (ROOT, ROOT, 1, 1, 3))
    assert tree.parents == (ROOT, ROOT, 1, 1, 3)
    assert tree.children == {ROOT: (0, 1), 1: (2, 3), 3: (4,)}
    assert tree.depths == (1, 1, 2, 2, 3)
    assert tree.depth == 3
    assert tree.path(4) == (1, 3, 4)
    assert not tree.is_chain
    assert TokenTree.chain([1, 2, 3]).is_chain
    assert TokenTree().depth == 0


def test_a_node_may_have_groups_of_several_sources() -> None:
    table = DraftProbs(torch.rand(1, 8))
    drawn = SiblingGroup(ROOT, (1, 2), drawn_from=table)
    tree = TokenTree((4, 4, 7), (SiblingGroup(ROOT, (0,), LOOKUP), drawn))
    assert tree.children == {ROOT: (0, 1, 2)}
    assert [(group.source, group.kind) for group in tree.groups_at(ROOT)] == [
        ("lookup", "deterministic"),
        ("draft", "drawn"),
    ]
    assert tree.groups_at(1) == ()


@pytest.mark.parametrize(
    ("tokens", "groups", "message"),
    [
        ((1, 2), [SiblingGroup(1, (0,)), SiblingGroup(ROOT, (1,))], "node 0 has parent 1"),
        ((1, 2), [SiblingGroup(ROOT, (0,))], "2 nodes but"),
        ((1, 2), [SiblingGroup(ROOT, (0, 1)), SiblingGroup(0, (1,))], "2 nodes but"),
    ],
)
def test_every_node_is_in_one_group_and_follows_its_parent(
    tokens: tuple[int, ...], groups: list[SiblingGroup], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, tuple(groups))


def test_a_shortened_tree_keeps_what_was_drawn() -> None:
    table = DraftProbs(torch.rand(3, 8))
    groups = [SiblingGroup(ROOT, (0, 2)), SiblingGroup(0, (1,), "a", table, 1), SiblingGroup(2, (3,), "b", table, 2)]
    tree = TokenTree((4, 7, 5, 6, 2), (*groups, SiblingGroup(1, (4,))))
    short = tree.shortened(2)
    assert short.tokens == (4, 7, 5, 6)
    assert short.groups == tuple(groups)
    assert tree.shortened(1).groups == (SiblingGroup(ROOT, (0, 1)),)
    assert tree.shortened(1).tokens == (4, 5)
    assert tree.shortened(3) is tree
    assert len(tree.shortened(0)) == 0
