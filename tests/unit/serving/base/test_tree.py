"""Token trees: shape, groups of siblings, and shortening."""

from __future__ import annotations

import pytest
import torch

from distillspec.serving.base.tree import LOOKUP, ROOT, DraftProbs, SiblingGroup, TokenTree, merged


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


def test_what_follows_a_duplicate_goes_on_behind_the_first_one() -> None:
    """Verification accepts the first of two alike, and would never come to the children of the second."""
    table = DraftProbs(torch.rand(3, 8))
    draft = TokenTree(
        (4, 5, 6, 7),
        (
            SiblingGroup(ROOT, (0, 1), drawn_from=table),
            SiblingGroup(0, (2,), drawn_from=table, row=1),
            SiblingGroup(2, (3,), drawn_from=table, row=2),
        ),
    )
    tree = merged([TokenTree.of_parents((9, 4, 6), (ROOT, ROOT, 1), "ngram"), draft])
    assert tree.tokens == (9, 4, 6, 4, 5, 6, 7)
    assert [(group.source, group.nodes) for group in tree.groups_at(ROOT)] == [("ngram", (0, 1)), ("draft", (3, 4))]
    assert [(group.source, group.nodes, group.row) for group in tree.groups_at(1)] == [
        ("ngram", (2,), 0),
        ("draft", (5,), 1),
    ]
    assert tree.parents[6] == 2, "behind the first 4, 6"
    assert tree.groups_at(3) == ()


def test_trees_without_common_tokens_are_put_side_by_side() -> None:
    tree = merged([TokenTree.chain([1, 2], source="a"), TokenTree.chain([3, 2], source="b")])
    assert (tree.tokens, tree.parents) == ((1, 2, 3, 2), (ROOT, 0, ROOT, 2))
