"""Block verification emits the target's law, by enumeration, and accepts no less than verification by token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import DraftProbs, TokenTree
from distillspec.serving.decoding.block_verification import Blocks, verify_blocks
from distillspec.serving.decoding.tree_batch import TreeBatch

CPU = torch.device("cpu")
V, LENGTH = 3, 3
Law = Callable[[tuple[int, ...]], Tensor]  # of the next token behind some tokens, `[V]` float64
Ends = Callable[[tuple[int, ...]], bool]  # of a chain, by the tokens drawn so far


def never(drawn: tuple[int, ...]) -> bool:
    return False


def random_law(seed: int, scale: float = 1.5) -> Law:
    rows: dict[tuple[int, ...], Tensor] = {}

    def law(drawn: tuple[int, ...]) -> Tensor:
        if drawn not in rows:
            generator = torch.Generator().manual_seed(seed + sum(7**i * (1 + t) for i, t in enumerate(drawn)))
            rows[drawn] = torch.softmax(scale * torch.randn(V, generator=generator).double(), -1)
        return rows[drawn]

    return law


def with_zeros(drawn: tuple[int, ...]) -> Tensor:
    found = torch.zeros(V, dtype=torch.float64)
    found[[sum(drawn) % V, (sum(drawn) + 1) % V]] = 0.5
    return found


def certain(drawn: tuple[int, ...]) -> Tensor:
    return torch.eye(V, dtype=torch.float64)[(2 * len(drawn) + 1) % V]


def on_part(law: Law) -> Law:
    """Without token 1."""

    def part(drawn: tuple[int, ...]) -> Tensor:
        found = law(drawn).clone()
        found[1] = 0
        return found / found.sum()

    return part


def chains(q: Law, ends: Ends, length: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every chain that could be drafted, with its probability. It ends early where `ends` says so before a draw."""
    found, growing = [], [(1.0, tuple[int, ...]())]
    while growing:
        chance, drawn = growing.pop()
        if len(drawn) == length or (drawn and ends(drawn)):
            found.append((chance, drawn))
        else:
            law = q(drawn).tolist()
            growing += [(chance * law[token], (*drawn, token)) for token in range(V) if law[token] > 0]
    return found


def blocks_of(tokens: tuple[int, ...], p: Law, q: Law, kept: Tensor | None, beside: TokenTree | None = None) -> Blocks:
    table = torch.stack([q(tokens[:i]) for i in range(len(tokens))]).float()
    drawn = DraftProbs(table if kept is None else table[:, kept], kept)
    trees = [TokenTree.chain(tokens, drawn), *([] if beside is None else [beside])]
    batch = TreeBatch(trees, CPU)
    rows = [p(tokens[:i]) for i in range(1 + len(tokens))]
    rows += [torch.full((V,), 1 / V, dtype=torch.float64)] * (batch.rows - len(rows))
    held = torch.stack(rows).float()
    return Blocks(batch, range(len(trees)), lambda asked: held[list(asked)])


def emitted(p: Law, q: Law, ends: Ends, kept: Tensor | None = None) -> tuple[Tensor, float]:
    """Return the law `[V, V, V]` of the first three tokens emitted, and the mean number of accepted ones."""
    found, accepted = torch.zeros(V, V, V, dtype=torch.float64), 0.0
    for chance, tokens in chains(q, ends, LENGTH):
        blocks = blocks_of(tokens, p, q, kept)
        hazards = blocks.chances()[0].tolist()
        none_longer = 1.0
        for taken in range(len(tokens), -1, -1):
            own = hazards[taken - 1] if taken else 1.0
            weight, none_longer = chance * none_longer * own, none_longer * (1 - own)
            if weight == 0:
                continue
            accepted += weight * taken
            rest = blocks.rest(torch.tensor([taken]))[0].double()
            add_law(found, weight, tokens[:taken], rest / rest.sum(), p)
    return found, accepted


def add_law(found: Tensor, weight: float, written: tuple[int, ...], following: Tensor, p: Law) -> None:
    """Add the law of three tokens: those written, one from `following`, and the rest from the target."""
    for tokens in product(range(V), repeat=3):
        known = min(len(written), 3)
        if tokens[:known] != written[:3]:
            continue
        share = weight
        for place in range(known, 3):
            law = following if place == len(written) else p(tokens[:place])
            share *= float(law[tokens[place]])
        found[tokens] += share


def targets_law(p: Law) -> Tensor:
    found = torch.zeros(V, V, V, dtype=torch.float64)
    for tokens in product(range(V), repeat=3):
        chance = 1.0
        for place in range(3):
            chance *= float(p(tokens[:place])[tokens[place]])
        found[tokens] = chance
    return found


def accepted_by_token(p: Law, q: Law, ends: Ends) -> float:
    total = 0.0
    for chance, tokens in chains(q, ends, LENGTH):
        stands = 1.0
        for place, token in enumerate(tokens):
            stands *= min(1.0, float(p(tokens[:place])[token] / q(tokens[:place])[token]))
            total += chance * stands
    return total


PAIRS: dict[str, tuple[Law, Law]] = {
    "random": (random_law(0), random_law(50)),
    "sharp": (random_law(3, 4.0), random_law(9, 4.0)),
    "equal": (random_law(0), random_law(0)),
    "zeros in p": (with_zeros, random_law(5)),
    "zeros in q": (random_law(5), with_zeros),
    "little common support": (certain, with_zeros),
}


@pytest.mark.parametrize("ends", ["never", "behind a token", "behind what was probable"])
@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_emitted_follows_the_target(pair: str, ends: str) -> None:
    p, q = PAIRS[pair]
    rules: dict[str, Ends] = {
        "never": never,
        "behind a token": lambda drawn: drawn[-1] == 2,
        "behind what was probable": lambda drawn: float(q(drawn).max()) > 0.6,
    }
    found, accepted = emitted(p, q, rules[ends])
    assert float((found - targets_law(p)).abs().sum() / 2) < 1e-6
    assert accepted > accepted_by_token(p, q, rules[ends]) - 1e-6


def test_a_draft_of_a_part_of_the_vocabulary_is_exact_too() -> None:
    p, q = random_law(0), on_part(random_law(50))
    found, _ = emitted(p, q, never, torch.tensor([0, 2]))
    assert float((found - targets_law(p)).abs().sum() / 2) < 1e-6


def test_more_is_accepted_than_by_token() -> None:
    p, q = PAIRS["random"]
    assert emitted(p, q, never)[1] > 1.02 * accepted_by_token(p, q, never)


def test_a_token_kept_by_its_surplus_alone_would_not_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named mistake: acceptance with probability wᵢ at every length, not hᵢ."""
    monkeypatch.setattr(Blocks, "chances", lambda self: self.weights[:, 1:])
    p, q = PAIRS["random"]
    assert float((emitted(p, q, never)[0] - targets_law(p)).abs().sum() / 2) > 1e-3


def test_chains_of_unlike_lengths_are_judged_as_alone() -> None:
    p, q, tokens = random_law(0), random_law(50), (2, 0, 1)
    uniform = DraftProbs(torch.full((1, V), 1 / V))
    alone, beside = blocks_of(tokens, p, q, None), blocks_of(tokens, p, q, None, TokenTree.chain([1], uniform))
    torch.testing.assert_close(beside.chances()[0], alone.chances()[0])
    assert float(beside.chances()[1, 0]) == pytest.approx(1)
    taken = torch.tensor([1, 1])
    torch.testing.assert_close(beside.rest(taken)[0], alone.rest(taken[:1])[0])
    torch.testing.assert_close(beside.rest(taken)[1], torch.full((V,), 1 / V))


@pytest.mark.parametrize(("coin", "path"), [(0.0, (0, 1, 2)), (1 - 1e-12, ())])
def test_verdicts_name_the_accepted_nodes_and_the_next_token(coin: float, path: tuple[int, ...]) -> None:
    p, q, tokens = random_law(0), random_law(50), (2, 0, 1)
    table = torch.stack([q(tokens[:i]) for i in range(3)]).float()
    batch = TreeBatch([TokenTree(), TokenTree.chain(tokens, DraftProbs(table))], CPU)
    held = torch.stack([p(()), *(p(tokens[:i]) for i in range(4))]).float()
    coins = torch.full((batch.rows,), coin, dtype=torch.float64)
    pending = verify_blocks(batch, [1], lambda rows: held[list(rows)], coins, torch.zeros(1, dtype=torch.float64))
    (verdict,) = pending.verdicts(pending.numbers.tolist())
    assert verdict.path == path
    rest = held[4] if path else (held[1] - table[0]).clamp(min=0)
    assert verdict.next_token == int((rest > 0).nonzero()[0])
