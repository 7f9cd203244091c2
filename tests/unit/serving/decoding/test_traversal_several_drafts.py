"""Trees of two and three drafts emit the target's law, by enumeration of all draws and outcomes. Mix-ups do not.

The drafts have levels of their own, unlike supports, tokens of probability zero, and often propose the same token: what
follows it then goes on behind the first node of that text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, TokenTree

from .enumeration import Process, fixed, law, sampled, side_by_side, traversed

V = 3
KEPT = torch.tensor([0, 2])


def laws(seed: int, width: int = V, zeros: bool = False) -> Tensor:
    """Return the law of the first token, and of the second after each of `width` tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.softmax(1.5 * torch.randn(1 + width, width, generator=generator).double(), -1)
    if zeros:
        found[:, seed % width] = 0.0
        found /= found.sum(-1, keepdim=True)
    return found


def drafted(widths: tuple[int, int], q: Tensor, kept: Tensor | None = None) -> Process:
    return sampled(widths, q[0], q[1:], kept)


SAME = laws(21)
PROCESSES: dict[str, Callable[[], Process]] = {
    "two chains": lambda: side_by_side(drafted((1, 1), laws(1)), drafted((1, 1), laws(2))),
    "a tree and a chain": lambda: side_by_side(drafted((2, 1), laws(3)), drafted((1, 1), laws(4))),
    "a chain and a tree": lambda: side_by_side(drafted((1, 1), laws(5)), drafted((1, 2), laws(6))),
    "a part of the vocabulary and all of it": lambda: side_by_side(
        drafted((2, 1), laws(7, 2), KEPT), drafted((1, 1), laws(8))
    ),
    "no token that both may draw first": lambda: side_by_side(
        drafted((1, 1), laws(9, zeros=True)), drafted((1, 1), torch.eye(V, dtype=torch.float64)[[0, 0, 1, 2]])
    ),
    "the same draft twice": lambda: side_by_side(drafted((1, 1), SAME), drafted((1, 1), SAME)),
    "three chains": lambda: side_by_side(
        drafted((1, 1), laws(11, zeros=True)), drafted((1, 1), laws(12, 2), KEPT), drafted((1, 1), laws(13, zeros=True))
    ),
    "three drafts, one of them alone with siblings": lambda: side_by_side(
        drafted((1, 0), laws(14)), drafted((2, 0), laws(15, zeros=True)), drafted((1, 1), laws(16, 2), KEPT)
    ),
    "a lookup between two drafts": lambda: side_by_side(
        drafted((1, 1), laws(17)), fixed(TokenTree.chain([1, 2])), drafted((1, 1), laws(18))
    ),
    "two drafts' most probable tokens": lambda: side_by_side(
        fixed(TokenTree.of_parents([1, 2, 0], [ROOT, ROOT, 0])), fixed(TokenTree.of_parents([1, 0, 2], [ROOT, ROOT, 0]))
    ),
}
TARGETS = {
    "random": laws(31),
    "zeros": laws(32, zeros=True),
    "ties": torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64),
    "one of the drafts": SAME,
}


def distance(found: Tensor, p: Tensor) -> float:
    """Total variation between what is emitted and the target's law."""
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    return float((found - p[0][:, None] * p[1:]).abs().sum() / 2)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROCESSES)
def test_level_by_level_and_from_the_leaves_the_target_is_followed(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = TARGETS[target]
    assert distance(traversed(PROCESSES[name](), p), p) < 1e-6
    assert distance(law(PROCESSES[name](), p[0], p[1:], "oracle", monkeypatch), p) < 1e-6


@pytest.mark.parametrize("verifier", ["by level", "all levels"])
@pytest.mark.parametrize("name", ["no token that both may draw first", "the same draft twice"])
def test_the_engines_verifier_follows_the_target(name: str, verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = TARGETS["zeros"]
    assert distance(law(PROCESSES[name](), p[0], p[1:], verifier, monkeypatch), p) < 1e-6


def with_the_others_q(process: Process) -> Process:
    """Trees of two drafts, each sibling judged with the other draft's distribution."""
    for chance, tree in process:
        tables = list({id(group.drawn_from): group.drawn_from for group in tree.groups}.values())
        others = {id(own): other for own, other in zip(tables, reversed(tables), strict=True)}
        yield (
            chance,
            TokenTree(
                tree.tokens, tuple([group._replace(drawn_from=others[id(group.drawn_from)]) for group in tree.groups])
            ),
        )


def without_duplicates(process: Process) -> Process:
    """Trees in which a token that both drafts propose is tried once."""
    for chance, tree in process:
        first, second = tree.children[ROOT]
        same = tree.tokens[first] == tree.tokens[second]
        yield chance, tree.of_nodes([n for n in range(len(tree)) if n != second]) if same else tree


@pytest.mark.parametrize(
    ("mistake", "name"), [(with_the_others_q, "two chains"), (without_duplicates, "the same draft twice")]
)
def test_mistakes_with_two_drafts_are_found_out(
    mistake: Callable[[Process], Iterator[tuple[float, TokenTree]]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, own = TARGETS["random"], PROCESSES[name]
    assert distance(traversed(mistake(own()), p), p) > 1e-3
    for verifier in ("oracle", "by level"):
        assert distance(law(mistake(own()), p[0], p[1:], verifier, monkeypatch), p) > 1e-3
