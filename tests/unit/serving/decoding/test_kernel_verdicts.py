"""Verdicts of the C++ kernel beside those of the readable forms, which are exact by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from distillspec.native.verdict_kernel import Chances
from distillspec.sampling import draw, policy_probs
from distillspec.sampling.checks import HOTTEST
from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding.block_verification import verify_blocks
from distillspec.serving.decoding.choices import verify_choices
from distillspec.serving.decoding.kernel_verdicts import JudgedTree, usable_kernel, verify_by_kernel
from distillspec.serving.decoding.noise import exponentials, hashed_ids
from distillspec.serving.decoding.reference_verification import verify_tree
from distillspec.serving.decoding.traversal import traversal
from distillspec.serving.decoding.tree_batch import TreeBatch
from distillspec.serving.decoding.verdict import TreeVerdict
from distillspec.types import SamplingPolicy

CPU = torch.device("cpu")
NO_KEYS = torch.empty(0, dtype=torch.int32)
PLAIN = SamplingPolicy()
FILTERS = [
    SamplingPolicy(0.7, top_p=0.9),
    SamplingPolicy(top_k=5),
    SamplingPolicy(1.3, min_p=0.05),
    SamplingPolicy(0.9, top_k=40, top_p=0.8, min_p=0.01),
    SamplingPolicy(30.0, top_p=0.99),
]
VOCABULARIES = [5, 8, 300, 523]  # narrower than a vector, one vector, blocks and what is left over

KERNEL = usable_kernel()
if KERNEL is None:
    pytest.skip("no C++ compiler", allow_module_level=True)


def judged(
    logits: Tensor,
    trees: list[JudgedTree],
    accept: Tensor,
    own: Tensor,
    *,
    paths: bool = True,
    keys: Tensor = NO_KEYS,
) -> list[TreeVerdict]:
    """Judge trees. `accept`: one a node of all trees."""
    assert KERNEL is not None
    peaks = logits.float().amax(-1)
    by_row = torch.zeros(len(logits), dtype=torch.float64)
    nodes = [judged.row + 1 + node for judged in trees for node in range(len(judged.tree))]
    by_row[nodes] = accept
    pending = verify_by_kernel(KERNEL, logits, peaks, trees, Chances(by_row, own, keys), paths=paths)
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


class Lot(NamedTuple):
    """150 sampled trees of nine nodes, and what they are judged by."""

    trees: list[JudgedTree]
    logits: Tensor  # [150, 10, V]
    accept: Tensor  # [150, 9]
    own: Tensor  # [150]

    @classmethod
    def of(cls, vocab: int, part: bool, sharpness: float, policies: list[SamplingPolicy]) -> Lot:
        generator, kept = torch.Generator().manual_seed(vocab), torch.arange(0, vocab, 2) if part else None
        trees = [sampled_tree(vocab, kept, generator) for _ in range(150)]
        logits = sharpness * torch.randn(150, 10, vocab, generator=generator)
        accept, own = uniforms(150 * 9, generator).view(150, 9), uniforms(150, generator)
        given = [JudgedTree(tree, 10 * i, policies[i % len(policies)]) for i, tree in enumerate(trees)]
        return cls(given, logits, accept, own)

    def judged(self, *, paths: bool) -> list[TreeVerdict]:
        return judged(self.logits.flatten(0, 1), self.trees, self.accept.flatten(), self.own, paths=paths)

    def by(self, reference: Callable[[Tensor, TokenTree, Tensor, Tensor], TreeVerdict]) -> list[TreeVerdict]:
        rows = zip(self.trees, self.logits, self.accept, self.own, strict=True)
        return [reference(policy_probs(own, tree.policy), tree.tree, *coins) for tree, own, *coins in rows]


@pytest.mark.parametrize("part", [False, True], ids=["whole vocabulary", "part of it"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_trees_are_judged_as_the_reference_judges_them(vocab: int, part: bool) -> None:
    lot = Lot.of(vocab, part, 2.0, [*FILTERS, PLAIN, SamplingPolicy(0.5)])
    found = lot.judged(paths=False)
    assert found == lot.by(verify_tree)
    assert {len(verdict.path) for verdict in found} == {0, 1, 2}


def test_fewer_tokens_may_be_left_than_top_k_keeps() -> None:
    """All but eight neighbours are forbidden, so that most pieces of a row have no number to look for."""
    lot = Lot.of(
        523, False, 2.0, [SamplingPolicy(top_k=5), SamplingPolicy(top_k=20), SamplingPolicy(top_k=20, top_p=0.5)]
    )
    logits = torch.full_like(lot.logits, -torch.inf)
    logits[..., 70:78] = lot.logits[..., 70:78]
    lot = lot._replace(logits=logits)
    found = lot.judged(paths=False)
    assert found == lot.by(verify_tree)
    assert {verdict.next_token for verdict in found} == set(range(70, 78))


def traversed(probs: Tensor, tree: TokenTree, accept: Tensor, own: Tensor) -> TreeVerdict:
    """Return the verdict where the accepted path ends at the first place that it may end at."""
    for stop in traversal(probs, tree):
        if stop.node == ROOT or float(accept[stop.node]) < stop.chance:
            return TreeVerdict(tree.path(stop.node), int(draw(stop.law[None], own[None])[0]))
    raise AssertionError("the text is always a place to end at")


@pytest.mark.parametrize("part", [False, True], ids=["whole vocabulary", "part of it"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_whole_paths_of_trees_are_judged_from_the_leaves(vocab: int, part: bool) -> None:
    lot = Lot.of(vocab, part, 0.5, [PLAIN, SamplingPolicy(0.5), FILTERS[0], FILTERS[2]])
    found = lot.judged(paths=True)
    assert found == lot.by(traversed)
    assert {len(verdict.path) for verdict in found} == {0, 1, 2}


@pytest.mark.parametrize("part", [False, True], ids=["whole vocabulary", "part of it"])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [*((vocab, torch.float32) for vocab in VOCABULARIES), (300, torch.bfloat16)]
)
@pytest.mark.parametrize("policy", [PLAIN, FILTERS[0], FILTERS[3]], ids=["plain", "top-p", "all filters"])
def test_chains_are_judged_as_blocks(vocab: int, part: bool, dtype: torch.dtype, policy: SamplingPolicy) -> None:
    generator, kept = torch.Generator().manual_seed(vocab), torch.arange(0, vocab, 2) if part else None
    trees, count = [], 300
    for i in range(count):
        table = random_table(vocab, kept, 4, generator, 0.3)
        trees.append(TokenTree.chain([drawn(table, row, 1, generator)[0] for row in range(1 + i % 4)], table))
    batch = TreeBatch(trees, CPU)
    logits = (0.3 * torch.randn(batch.rows, vocab, generator=generator)).to(dtype)
    accept, own = uniforms(batch.rows, generator), uniforms(count, generator)
    probs = policy_probs(logits.float(), policy)
    pending = verify_blocks(batch, range(count), lambda rows: probs[list(rows)], accept, own)
    nodes = [first + 1 + node for first, tree in zip(batch.firsts, trees, strict=True) for node in range(len(tree))]
    given = [JudgedTree(tree, first, policy) for tree, first in zip(trees, batch.firsts, strict=True)]
    found = judged(logits, given, accept[nodes], own)
    assert found == pending.verdicts(pending.numbers.tolist())
    assert {len(verdict.path) for verdict in found} >= ({0, 1, 2, 3} if policy == PLAIN else {0, 1})


@pytest.mark.parametrize("paths", [True, False])
def test_a_draft_that_is_the_target_is_accepted_and_nothing_of_probability_zero_is_written(paths: bool) -> None:
    generator, vocab = torch.Generator().manual_seed(1), 300
    logits = torch.randn(4, vocab, generator=generator)
    logits[:, ::2] = -torch.inf
    table = DraftProbs(torch.softmax(logits, -1))
    for _ in range(200):
        tree = TokenTree.chain([drawn(table, row, 1, generator)[0] for row in range(3)], table)
        # As close to 1 as acceptance can be asked for: rounding may reject, and must then leave something to write.
        accept, own = torch.full((3,), 1 - 1e-7, dtype=torch.float64), uniforms(1, generator)
        (verdict,) = judged(logits, [JudgedTree(tree, 0, PLAIN)], accept, own, paths=paths)
        assert verdict.next_token % 2 == 1
        assert judged(logits, [JudgedTree(tree, 0, PLAIN)], accept - 1e-3, own, paths=paths)[0].path == (0, 1, 2)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_scale_give_tokens_that_have_a_probability(uniform: float) -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 280, 590]] = torch.tensor([0.0, -80.0, -5.0])
    own = torch.tensor([uniform], dtype=torch.float64)
    (verdict,) = judged(logits, [JudgedTree(TokenTree(), 0, PLAIN)], torch.empty(0, dtype=torch.float64), own)
    assert verdict.next_token in (3, 590)


def test_a_temperature_near_zero_gives_the_most_probable_token() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    own = torch.tensor([0.7], dtype=torch.float64)
    (verdict,) = judged(
        logits, [JudgedTree(TokenTree(), 0, SamplingPolicy(1e-30))], torch.empty(0, dtype=torch.float64), own
    )
    assert verdict.next_token == int(logits.argmax())


@pytest.mark.parametrize("policy", [SamplingPolicy(HOTTEST), SamplingPolicy(HOTTEST, top_p=0.9)])
def test_at_the_highest_temperature_a_banned_token_is_never_written(policy: SamplingPolicy) -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(2))
    logits[:, ::2] = -torch.inf
    own = (torch.arange(40, dtype=torch.float64) + 0.5) / 40
    trees = [JudgedTree(TokenTree(), row, policy) for row in range(40)]
    written = [verdict.next_token for verdict in judged(logits, trees, torch.empty(0, dtype=torch.float64), own)]
    assert all(token % 2 for token in written)
    assert max(written) - min(written) > 200, "all others are as probable"


def test_uniforms_and_logits_with_gaps_are_read_rightly() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, own = torch.randn(8, 300, generator=generator), uniforms(8, generator)
    trees = [JudgedTree(TokenTree(), row, PLAIN) for row in range(4)]
    accept = torch.empty(0, dtype=torch.float64)
    apart = judged(logits[::2], trees, accept, own[::2])
    assert apart == judged(logits[::2].contiguous(), trees, accept, own[::2].contiguous())


def test_tables_of_other_precision_are_read_as_float32() -> None:
    generator = torch.Generator().manual_seed(4)
    logits, table = torch.randn(4, 40, generator=generator), random_table(40, None, 3, generator)
    doubles = DraftProbs(table.probs.double())
    chains = [TokenTree.chain([1, 2, 3], own) for own in (table, doubles)]
    accept, own = uniforms(3, generator), uniforms(1, generator)
    first, second = (judged(logits, [JudgedTree(chain, 0, PLAIN)], accept, own) for chain in chains)
    assert first == second


def test_of_tokens_that_tie_at_a_nucleus_edge_the_lowest_ids_are_inside() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 100:] = -1.0
    policy = SamplingPolicy(top_p=0.25)
    kept = (policy_probs(logits, policy)[0] > 0).nonzero()[:, 0].tolist()
    own = torch.arange(0, 1, 1 / 500, dtype=torch.float64)
    trees = [JudgedTree(TokenTree(), 0, policy)] * len(own)
    found = judged(logits, trees, torch.empty(0, dtype=torch.float64), own)
    assert sorted({verdict.next_token for verdict in found}) == kept


@pytest.mark.parametrize("policy", [PLAIN, *FILTERS])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_seeded_tokens_are_those_of_the_noise(vocab: int, policy: SamplingPolicy) -> None:
    generator = torch.Generator().manual_seed(vocab)
    trees = [sampled_tree(vocab, None, generator) for _ in range(60)]
    logits = 2 * torch.randn(600, vocab, generator=generator)
    keys = torch.randint(2**31 - 1, (600, 2), generator=generator, dtype=torch.int32)
    scores = policy_probs(logits, policy) / exponentials(keys, hashed_ids(torch.arange(vocab)))
    chosen = scores.argmax(-1).view(60, 10)
    given = [JudgedTree(tree, 10 * i, policy, seeded=True) for i, tree in enumerate(trees)]
    found = judged(logits, given, torch.zeros(540).double(), torch.zeros(60).double(), keys=keys)
    pending = verify_choices(trees, chosen.flatten())
    assert found == pending.verdicts(pending.numbers.tolist())
