"""The verifier keeps the target's distribution, for chains and trees. The same test finds broken verifiers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distillspec.rejection_sampling import residual_probs
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.decoding import verification
from distillspec.serving.decoding.verification import verify_choices, verify_tree

V = 8
TRIALS = 4000
Draw = Callable[[torch.Generator], TokenTree]


def target_tables(seed: int = 0) -> tuple[Tensor, Tensor]:
    """p(first) `[V]` and p(second | first) `[V, V]`, peaked as language is."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.softmax(1.5 * torch.randn(V, generator=generator), -1),
        torch.softmax(1.5 * torch.randn(V, V, generator=generator), -1),
    )


def draft_tables() -> tuple[Tensor, Tensor]:
    first, second = target_tables(seed=5)
    return first, second


def sampled_tree(widths: tuple[int, int], generator: torch.Generator) -> TokenTree:
    """`widths[0]` first tokens drawn without replacement, `widths[1]` after each."""
    first, second = draft_tables()
    roots = torch.multinomial(first, widths[0], generator=generator).tolist()
    tokens, parents, rows, probs = list(roots), [ROOT] * len(roots), {ROOT: 0}, [first]
    for node, token in enumerate(roots):
        if widths[1]:
            rows[node] = len(probs)
            probs.append(second[token])
            tokens += torch.multinomial(second[token], widths[1], generator=generator).tolist()
            parents += [node] * widths[1]
    return TokenTree(tuple(tokens), tuple(parents), "sampled", torch.stack(probs), rows)


def fixed_tree(generator: torch.Generator) -> TokenTree:
    return TokenTree((2, 5, 1, 2), (ROOT, ROOT, 0, 0))


def emitted(draw: Draw, trials: int = TRIALS, verify: Callable[..., verification.Verdict] = verify_tree) -> Tensor:
    """Count each pair of first and second token `[V, V]`. A single emitted token is completed from p itself."""
    first, second = target_tables()
    counts = torch.zeros(V, V, dtype=torch.float64)
    generator = torch.Generator().manual_seed(11)
    residual = torch.Generator().manual_seed(12)
    for _ in range(trials):
        tree = draw(generator)
        probs = torch.stack([first] + [second[token] for token in tree.tokens])
        accept = torch.rand(len(tree), generator=generator, dtype=torch.float64)
        verdict = verify(probs, tree, accept, torch.rand((), generator=residual, dtype=torch.float64))
        tokens = [tree.tokens[node] for node in verdict.path] + [verdict.next_token]
        if len(tokens) == 1:
            tokens.append(int(torch.multinomial(second[tokens[0]], 1, generator=residual)))
        counts[tokens[0], tokens[1]] += 1
    return counts


def chi_square_excess(counts: Tensor) -> float:
    """Return (χ² − df) / √(2 df) of the pairs. Pairs expected less than 5 times are merged."""
    first, second = target_tables()
    wanted = (first[:, None] * second).double() * counts.sum()
    rare = wanted < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    degrees = len(wanted) - 1
    return float((((seen - wanted) ** 2 / wanted).sum() - degrees) / (2 * degrees) ** 0.5)


TREES: dict[str, Draw] = {
    "chain of one": lambda g: sampled_tree((1, 0), g),
    "chain of two": lambda g: sampled_tree((1, 1), g),
    "width two": lambda g: sampled_tree((2, 1), g),
    "width four": lambda g: sampled_tree((4, 0), g),
    "wide and deep": lambda g: sampled_tree((3, 2), g),
    "deterministic": fixed_tree,
}


@pytest.mark.parametrize("shape", TREES)
def test_what_comes_out_is_distributed_as_the_target(shape: str) -> None:
    assert chi_square_excess(emitted(TREES[shape])) < 4


def _keeps_p_after_a_rejection(p: Tensor, q: Tensor | None, rejected: int) -> tuple[Tensor, Tensor | None]:
    return p, q


def _forgets_to_take_the_sibling_out(p: Tensor, q: Tensor | None, rejected: int) -> tuple[Tensor, Tensor | None]:
    assert q is not None
    rest = residual_probs(p / p.sum(), q)
    return rest / rest.sum(), q


@pytest.mark.parametrize(
    ("mutation", "shape"),
    [(_keeps_p_after_a_rejection, "chain of one"), (_forgets_to_take_the_sibling_out, "width four")],
)
def test_a_broken_residual_is_found_out(
    monkeypatch: pytest.MonkeyPatch, mutation: Callable[..., object], shape: str
) -> None:
    monkeypatch.setattr(verification, "after_rejection", mutation)
    assert chi_square_excess(emitted(TREES[shape])) > 8


def test_a_residual_that_shares_the_acceptance_stream_is_found_out() -> None:
    def shares(probs: Tensor, tree: TokenTree, accept: Tensor, fresh: Tensor) -> verification.Verdict:
        return verify_tree(probs, tree, accept, accept[-1])

    assert chi_square_excess(emitted(TREES["chain of one"], verify=shares)) > 8


def test_choices_walk_down_the_tree_while_they_agree() -> None:
    tree = TokenTree((4, 7, 5, 6, 9), (ROOT, ROOT, 1, 1, 3))
    assert verify_choices([7, 0, 6, 0, 9, 3].__getitem__, tree) == ((1, 3, 4), 3)
    assert verify_choices([7, 0, 8, 0, 9, 3].__getitem__, tree) == ((1,), 8)
    assert verify_choices([3, 0, 6, 0, 9, 3].__getitem__, tree) == ((), 3)
    assert verify_choices([3].__getitem__, TokenTree()) == ((), 3)
