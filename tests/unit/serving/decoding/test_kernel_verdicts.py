"""Verdicts of the C++ kernel beside those of the readable forms, which are exact by enumeration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.serving.base.tree import DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding.block_verification import verify_blocks
from distillspec.serving.decoding.kernel_verdicts import DrawnTree, usable_kernel, verify_by_kernel
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.verification import TreeVerdict, verify_tree

CPU = torch.device("cpu")
VOCABULARIES = [5, 8, 300, 523]  # narrower than a vector, one vector, blocks and what is left over

if usable_kernel() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)


def judged(
    logits: Tensor, trees: list[DrawnTree], accept: Tensor, own: Tensor, *, blocks: bool = True
) -> list[TreeVerdict]:
    peaks = logits.float().amax(-1)
    pending = verify_by_kernel(logits, peaks, trees, accept, own, blocks=blocks)
    return pending.verdicts(pending.numbers.tolist())


def uniforms(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def random_table(
    vocab: int, kept: Tensor | None, rows: int, generator: torch.Generator, sharpness: float = 2.0
) -> DraftProbs:
    width = vocab if kept is None else len(kept)
    return DraftProbs(torch.softmax(sharpness * torch.randn(rows, width, generator=generator), -1), kept)


def drawn(table: DraftProbs, row: int, count: int, generator: torch.Generator) -> list[int]:
    columns = torch.multinomial(table.probs[row], count, generator=generator)
    return (columns if table.kept_ids is None else table.kept_ids[columns]).tolist()


def sampled_tree(vocab: int, kept: Tensor | None, generator: torch.Generator) -> TokenTree:
    """Two drawn siblings, and a deterministic one, behind the text and behind two of these."""
    table, tokens, groups = random_table(vocab, kept, 3, generator), list[int](), list[SiblingGroup]()
    for row, parent in enumerate((-1, 0, 2)):
        first = len(tokens)
        tokens += drawn(table, row, 2, generator)
        tokens.append(int(torch.randint(vocab, (), generator=generator)))
        groups.append(SiblingGroup(parent, (first, first + 1), drawn_from=table, row=row))
        groups.append(SiblingGroup(parent, (first + 2,)))
    return TokenTree(tuple(tokens), tuple(groups))


@pytest.mark.parametrize("part", [False, True], ids=["whole vocabulary", "part of it"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_trees_are_judged_as_the_reference_judges_them(vocab: int, part: bool) -> None:
    generator, kept = torch.Generator().manual_seed(vocab), torch.arange(0, vocab, 2) if part else None
    trees = [sampled_tree(vocab, kept, generator) for _ in range(150)]
    logits = 2 * torch.randn(150, 10, vocab, generator=generator)
    accept, own = uniforms(150 * 9, generator), uniforms(150, generator)
    given = [DrawnTree(tree, 10 * i, 0.5 + i % 3) for i, tree in enumerate(trees)]
    found = judged(logits.flatten(0, 1), given, accept, own)
    wanted = [
        verify_tree(torch.softmax(rows / tree.temperature, -1), tree.tree, accept[9 * i : 9 * i + 9], own[i])
        for i, (tree, rows) in enumerate(zip(given, logits, strict=True))
    ]
    assert found == wanted
    assert {len(verdict.path) for verdict in found} == {0, 1, 2}


@pytest.mark.parametrize("part", [False, True], ids=["whole vocabulary", "part of it"])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [*((vocab, torch.float32) for vocab in VOCABULARIES), (300, torch.bfloat16)]
)
def test_chains_are_judged_as_blocks(vocab: int, part: bool, dtype: torch.dtype) -> None:
    generator, kept = torch.Generator().manual_seed(vocab), torch.arange(0, vocab, 2) if part else None
    trees, count = [], 500
    for i in range(count):
        table = random_table(vocab, kept, 4, generator, 0.3)
        trees.append(TokenTree.chain([drawn(table, row, 1, generator)[0] for row in range(1 + i % 4)], table))
    batch = TreeBatch(trees, CPU)
    logits = (0.3 * torch.randn(batch.rows, vocab, generator=generator)).to(dtype)
    accept, own = uniforms(batch.rows, generator), uniforms(count, generator)
    probs = torch.softmax(logits.float(), -1)
    pending = verify_blocks(batch, range(count), lambda rows: probs[list(rows)], accept, own)
    nodes = [first + 1 + node for first, tree in zip(batch.firsts, trees, strict=True) for node in range(len(tree))]
    given = [DrawnTree(tree, first, 1.0) for tree, first in zip(trees, batch.firsts, strict=True)]
    found = judged(logits, given, accept[nodes], own)
    assert found == pending.verdicts(pending.numbers.tolist())
    assert {len(verdict.path) for verdict in found} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("blocks", [True, False])
def test_a_draft_that_is_the_target_is_accepted_and_nothing_of_probability_zero_is_written(blocks: bool) -> None:
    generator, vocab = torch.Generator().manual_seed(1), 300
    logits = torch.randn(4, vocab, generator=generator)
    logits[:, ::2] = -torch.inf
    table = DraftProbs(torch.softmax(logits, -1))
    for _ in range(200):
        tree = TokenTree.chain([drawn(table, row, 1, generator)[0] for row in range(3)], table)
        # As close to 1 as acceptance can be asked for: rounding may reject, and must then leave something to write.
        accept, own = torch.full((3,), 1 - 1e-7, dtype=torch.float64), uniforms(1, generator)
        (verdict,) = judged(logits, [DrawnTree(tree, 0, 1.0)], accept, own, blocks=blocks)
        assert verdict.next_token % 2 == 1
        assert judged(logits, [DrawnTree(tree, 0, 1.0)], accept - 1e-3, own, blocks=blocks)[0].path == (0, 1, 2)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_scale_give_tokens_that_have_a_probability(uniform: float) -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 280, 590]] = torch.tensor([0.0, -80.0, -5.0])
    own = torch.tensor([uniform], dtype=torch.float64)
    (verdict,) = judged(logits, [DrawnTree(TokenTree(), 0, 1.0)], torch.empty(0, dtype=torch.float64), own)
    assert verdict.next_token in (3, 590)


def test_a_temperature_near_zero_gives_the_most_probable_token() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    own = torch.tensor([0.7], dtype=torch.float64)
    (verdict,) = judged(logits, [DrawnTree(TokenTree(), 0, 1e-30)], torch.empty(0, dtype=torch.float64), own)
    assert verdict.next_token == int(logits.argmax())


def test_uniforms_and_logits_with_gaps_are_read_rightly() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, own = torch.randn(8, 300, generator=generator), uniforms(8, generator)
    trees = [DrawnTree(TokenTree(), row, 1.0) for row in range(4)]
    accept = torch.empty(0, dtype=torch.float64)
    apart = judged(logits[::2], trees, accept, own[::2])
    assert apart == judged(logits[::2].contiguous(), trees, accept, own[::2].contiguous())


def test_tables_of_other_precision_are_read_as_float32() -> None:
    generator = torch.Generator().manual_seed(4)
    logits, table = torch.randn(4, 40, generator=generator), random_table(40, None, 3, generator)
    doubles = DraftProbs(table.probs.double())
    chains = [TokenTree.chain([1, 2, 3], own) for own in (table, doubles)]
    accept, own = uniforms(3, generator), uniforms(1, generator)
    first, second = (judged(logits, [DrawnTree(chain, 0, 1.0)], accept, own) for chain in chains)
    assert first == second
