"""All verifiers emit the target's law, by enumeration of all drafts and outcomes. The named mistakes do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding.tree_batch import DrawnRows
from distillspec.serving.decoding.tree_rules import RejectionRule

from .enumeration import Process, drawn, fixed, law, sampled, side_by_side

ENGINES = ("by level", "all levels")
VERIFIERS = ("oracle", *ENGINES, "from the leaves")
OTHERS = ("oracle", "all levels")
V = 4


def tables(seed: int, rows: int = 1 + V, width: int = V) -> tuple[Tensor, Tensor]:
    """A law of the first token `[width]`, and of the second after each of them, float64."""
    found = torch.softmax(1.5 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).double(), -1)
    return found[0], found[1:]


def with_ties_and_zeros() -> tuple[Tensor, Tensor]:
    first = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    second = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.25] * 4, [0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]])
    return first, second.double()


def other_support() -> tuple[Tensor, Tensor]:
    """Of which no token of `with_ties_and_zeros` is drawn first."""
    first = torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    return first, torch.eye(4, dtype=torch.float64)


KEPT = torch.tensor([0, 2, 3])
Pair = tuple[Tensor, Tensor]


def on_part(widths: tuple[int, int], seed: int) -> Process:
    """Trees of a draft that knows a part of the vocabulary."""
    return sampled(widths, *tables(seed, 1 + len(KEPT), len(KEPT)), KEPT)


PROCESSES: dict[str, Callable[[Pair], Process]] = {
    "nothing": lambda q: fixed(TokenTree()),
    "chain of one": lambda q: sampled((1, 0), *q),
    "chain of two": lambda q: sampled((1, 1), *q),
    "two side by side": lambda q: sampled((2, 0), *q),
    "all side by side": lambda q: sampled((4, 0), *q),
    "two, then one": lambda q: sampled((2, 1), *q),
    "one, then two": lambda q: sampled((1, 2), *q),
    "on a part of the vocabulary": lambda q: on_part((2, 1), 9),
    "deterministic": lambda q: fixed(TokenTree.of_parents([2, 0, 1, 3, 2], [ROOT, ROOT, 0, 0, 1])),
    "deterministic, twice the same": lambda q: fixed(TokenTree.of_parents([1, 1], [ROOT, ROOT])),
    "two sources": lambda q: side_by_side(sampled((2, 0), *q), sampled((1, 0), *tables(7))),
    "two sources of two": lambda q: side_by_side(on_part((2, 0), 3), on_part((2, 0), 7)),
    "lookup, then a draft": lambda q: side_by_side(fixed(TokenTree.chain([1])), sampled((2, 0), *q)),
    "lookup, then a draft of two levels": lambda q: side_by_side(fixed(TokenTree.chain([1, 2])), sampled((2, 1), *q)),
    "a grown tree, then a draft": lambda q: side_by_side(
        fixed(TokenTree.of_parents([1, 2, 0], [ROOT, ROOT, 0])), sampled((1, 2), *q)
    ),
    "a draft of two levels, then lookup": lambda q: side_by_side(sampled((2, 1), *q), fixed(TokenTree.chain([1, 3]))),
    "a draft, then lookup": lambda q: side_by_side(sampled((2, 0), *q), fixed(TokenTree.chain([1]))),
}
PAIRS = {
    "random": (tables(0), tables(5)),
    "equal": (tables(0), tables(0)),
    "ties and zeros in p": (with_ties_and_zeros(), tables(5)),
    "ties and zeros in q": (tables(0), with_ties_and_zeros()),
    "no common support": (with_ties_and_zeros(), other_support()),
}


def distance(process: Process, p: Pair, verifier: str, patch: pytest.MonkeyPatch) -> float:
    """Total variation between what is emitted and the target's law."""
    found = law(process, *p, verifier, patch)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    return float((found - p[0][:, None] * p[1]).abs().sum() / 2)


# Both engines share their rules, so every pair is tried with one of them.
RUNS = [(pair, own) for pair in PAIRS for own in ("by level", "from the leaves")]
RUNS += [(pair, own) for pair in ("random", "no common support") for own in OTHERS]


@pytest.mark.parametrize(("pair", "verifier"), RUNS)
@pytest.mark.parametrize("name", PROCESSES)
def test_what_is_emitted_follows_the_target(
    name: str, pair: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = PAIRS[pair]
    assert distance(PROCESSES[name](q), p, verifier, monkeypatch) < 1e-6


def in_score_order(q: Pair) -> Process:
    """Siblings tried by what the draft thinks of them, not in the order of their draws."""
    for chance, tokens in drawn(2, q[0]):
        ordered = sorted(tokens, key=lambda token: -float(q[0][token]))
        yield from ((chance, tree) for _, tree in _as_drawn(tuple(ordered), q))


def best_of_three(q: Pair) -> Process:
    """Two of three draws, chosen by the scores of what was drawn."""
    for chance, tokens in drawn(3, q[0]):
        kept = sorted(tokens, key=lambda token: -float(q[0][token]))[:2]
        yield from ((chance, tree) for _, tree in _as_drawn(tuple(t for t in tokens if t in kept), q))


def top_two_as_if_drawn(q: Pair) -> Process:
    """The two best tokens, judged as if they had been drawn from the softmax over the two."""
    best = q[0].topk(2).indices.tolist()
    only = torch.zeros_like(q[0]).index_copy_(0, torch.tensor(best), q[0][best] / q[0][best].sum())
    return _as_drawn(tuple(best), (only, q[1]))


def without_the_duplicate(q: Pair) -> Process:
    """Two sources, where a token that both propose is tried once."""
    for chance, tree in side_by_side(sampled((1, 0), *q), sampled((1, 0), *tables(7))):
        one, other = tree.tokens
        yield chance, TokenTree((one,), tree.groups[:1]) if one == other else tree


def stopped_by_what_was_drawn(q: Pair) -> Process:
    """One token, dropped where the draft thinks little of it. A stop rule may look at q before the draw alone."""
    for chance, tree in sampled((1, 0), *q):
        yield chance, tree if float(q[0][tree.tokens[0]]) > 1 / V else TokenTree()


def _as_drawn(tokens: tuple[int, ...], q: Pair) -> Process:
    for _, tree in sampled((len(tokens), 0), *q):
        if tree.tokens == tokens:
            yield 1.0, tree


BREAKING = [in_score_order, best_of_three, top_two_as_if_drawn, without_the_duplicate, stopped_by_what_was_drawn]


@pytest.mark.parametrize("process", BREAKING)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_proposer_that_breaks_the_rules_is_found_out(
    process: Callable[[Pair], Process], verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, q = PAIRS["random"]
    assert distance(process(q), p, verifier, monkeypatch) > 0.004


def _forgets_elder_siblings(rule: RejectionRule, child: Tensor, rank: int) -> None:
    return None


def _keeps_p(rule: RejectionRule, p: Tensor, *rest: Any) -> Tensor:
    return p


def _takes_the_first_row(drawn: DrawnRows, nodes: Tensor, elder: Any) -> Tensor:
    return drawn.probs[:1].float().expand(len(nodes), -1).clone()


MUTANTS: list[tuple[type, str, Callable[..., Any], str]] = [
    (RejectionRule, "elder", _forgets_elder_siblings, "all side by side"),
    (RejectionRule, "residual", _keeps_p, "chain of one"),
    (RejectionRule, "subtract", _keeps_p, "two side by side"),
    (DrawnRows, "probs_of", _takes_the_first_row, "chain of two"),
]


@pytest.mark.parametrize(("owner", "name", "mutant", "process"), MUTANTS)
@pytest.mark.parametrize("verifier", ENGINES)
def test_a_broken_verifier_is_found_out(
    owner: type, name: str, mutant: Callable[..., Any], process: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    p, q = PAIRS["random"]
    assert distance(PROCESSES[process](q), p, verifier, monkeypatch) > 0.004


def walks(path: Sequence[int], p: Pair) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """What target samples along a path write: its tokens as far as they agree, and the first sample that does not.

    Yields the probability, how many tokens agree, and the text.
    """
    chance = 1.0
    for place, token in enumerate(path):
        law = p[1][path[0]] if place else p[0]
        for other in range(V):
            if other != token:
                yield chance * float(law[other]), place, (*path[:place], other)
        chance *= float(law[token])
    yield chance, len(path), tuple(path)


def longest_of_independent_samples(paths: Sequence[Sequence[int]], p: Pair) -> Tensor:
    """The law `[V, V]` of two tokens where each path has target samples of its own, and the longest walk is kept."""
    found = torch.zeros_like(p[1])
    for each in product(*[list(walks(path, p)) for path in paths]):
        chance = prod(own for own, _, _ in each)
        first, *second = max(each, key=lambda walk: walk[1])[2]
        found[first] += chance * (torch.eye(V).double()[second[0]] if second else p[1][first])
    return found


def test_the_longest_of_paths_that_each_have_their_own_samples_is_found_out() -> None:
    """Medusa's nucleus mode. One path alone is exact."""
    p, _ = PAIRS["random"]
    wanted = p[0][:, None] * p[1]
    assert torch.allclose(longest_of_independent_samples([(2, 0)], p), wanted)
    found = longest_of_independent_samples([(2, 0), (0, 1)], p)
    assert float(found.sum()) == pytest.approx(1)
    assert float((found - wanted).abs().sum() / 2) > 0.004
