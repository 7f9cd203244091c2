"""The engine's batched verdicts: the reference's own, and the target's distribution on wide and narrow vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.sampling import policy_probs
from distillspec.serving import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.decoding import sampling
from distillspec.serving.decoding.logits import Place
from distillspec.serving.decoding.reference_verification import verify_tree
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.tree_batch import DrawnRows
from distillspec.serving.decoding.tree_rules import RejectionRule
from distillspec.serving.decoding.verdict import TreeVerdict
from distillspec.serving.decoding.windows import VerificationWindow

CPU = torch.device("cpu")


def row(name: str, params: SamplingParams) -> SequenceState:
    return SequenceState(name, Request(name, (1,), params), 0, 0, [1], frozenset(), 64)


def random_tree(vocab: int, kept: Tensor, generator: torch.Generator) -> TokenTree:
    """Up to three levels of up to three siblings: drawn ones on `kept`, deterministic ones, some nodes with both."""
    tokens, groups, parents, rows = list[int](), list[SiblingGroup](), [ROOT], 0
    table = DraftProbs(torch.softmax(torch.randn(64, len(kept), generator=generator), -1), kept)
    for _ in range(int(torch.randint(4, (), generator=generator))):
        level = []
        for parent in parents[:4]:
            for drawn in (True, False):
                width = int(torch.randint(3, (), generator=generator))
                if not width:
                    continue
                nodes = tuple(range(len(tokens), len(tokens) + width))
                if drawn:
                    own = kept[torch.multinomial(table.probs[rows], width, generator=generator)]
                    groups.append(SiblingGroup(parent, nodes, drawn_from=table, row=rows))
                    rows += 1
                else:
                    own = torch.randint(vocab, (width,), generator=generator)
                    groups.append(SiblingGroup(parent, nodes))
                tokens += own.tolist()
                level += nodes
        parents = level
    return TokenTree(tuple(tokens), tuple(groups))


@pytest.mark.parametrize(("reads_are_free", "kernel"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 3, "min_p": 0.05}, {}])
def test_many_trees_at_once_are_judged_as_the_reference_judges_each(
    reads_are_free: bool, kernel: bool, filters: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(2)
    vocab, kept = 8, torch.arange(0, 8, 2)
    policies = SamplingParams(temperature=0.8, **filters), SamplingParams(temperature=1.2)
    windows, logits = [], []
    for b in range(200):
        tree = random_tree(vocab, kept, generator)
        windows.append(VerificationWindow(row(str(b), policies[b % 2]), tree))
        logits.append(2 * torch.randn(1 + len(tree), vocab, generator=generator))
    sampler = TokenSampler(
        vocab, CPU, seed=3, reads_are_free=reads_are_free, verification="exact_by_token", kernel=kernel
    )
    found = sampler.verify(torch.cat(logits), windows)
    rows = sum(map(len, logits))
    accept = torch.rand(rows, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    residual = torch.rand(200, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    first, depths = 0, set[int]()
    for b, (window, own, judgement) in enumerate(zip(windows, logits, found, strict=True)):
        probs = policy_probs(own, window.sequence.params.policy)
        assert judgement.verdict == verify_tree(probs, window.tree, accept[first + 1 : first + len(own)], residual[b])
        first += len(own)
        depths.add(len(judgement.verdict.path))
    assert depths == {0, 1, 2, 3}, "paths of every length"


def chosen_by_walking(choices: Sequence[int], tree: TokenTree) -> TreeVerdict:
    """Return the path and the next token where the target's token is known at every row."""
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        match = [child for child in tree.children.get(node, ()) if tree.tokens[child] == choices[1 + node]]
        if not match:
            return TreeVerdict(tuple(path), choices[1 + node])
        path.append(match[0])


@pytest.mark.parametrize("reads_are_free", [True, False])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 5, "top_p": 0.9}])
def test_choices_walk_down_the_trees_while_they_agree(reads_are_free: bool, params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    vocab, kept, sampling = 6, torch.arange(6), SamplingParams(**params)
    trees = [random_tree(vocab, kept, generator) for _ in range(40)]
    windows = [VerificationWindow(row(str(b), sampling), tree) for b, tree in enumerate(trees)]
    logits = [2 * torch.randn(1 + len(tree), vocab, generator=generator) for tree in trees]
    sampler = TokenSampler(vocab, CPU, reads_are_free=reads_are_free)
    found = [judgement.verdict for judgement in sampler.verify(torch.cat(logits), windows)]
    for window, own, verdict in zip(windows, logits, found, strict=True):
        places = window.places()
        alone = [
            sampler.verify(own[r : r + 1], [VerificationWindow(_after(places[r]), TokenTree())])[0].verdict
            for r in range(len(own))
        ]
        choices = [each.next_token for each in alone if each is not None]
        assert verdict == chosen_by_walking(choices, window.tree)
    assert {len(verdict.path) for verdict in found if verdict is not None} >= {0, 1, 2}


def _after(place: Place) -> SequenceState:
    """The sequence after a place's drafted tokens."""
    sequence = row(place.sequence.id, place.sequence.params)
    sequence.tokens += place.drafted
    return sequence


def emitted_first(
    vocab: int, trials: int, params: SamplingParams, lot: int, reads_are_free: bool = True, kernel: bool = True
) -> tuple[Tensor, Tensor]:
    """Count the first ids emitted by chains of one drafted token, and return p. The draft is the target upside down."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    draft_probs = torch.softmax(-logits, -1)
    table = DraftProbs(draft_probs[None])
    sampler = TokenSampler(vocab, CPU, seed=5, reads_are_free=reads_are_free, kernel=kernel)
    generator = torch.Generator().manual_seed(6)
    counts, owner, rows = torch.zeros(vocab), row("x", params), logits.expand(2 * lot, -1)
    for _ in range(trials // lot):
        drafted = torch.multinomial(draft_probs, lot, replacement=True, generator=generator).tolist()
        windows = [VerificationWindow(owner, TokenTree.chain([token], table)) for token in drafted]
        first = [
            token if judgement.verdict.path else judgement.verdict.next_token  # type: ignore[union-attr]
            for token, judgement in zip(drafted, sampler.verify(rows, windows), strict=True)
        ]
        counts += torch.bincount(torch.tensor(first), minlength=vocab)
    return counts, torch.softmax(logits, -1)


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """χ² and its degrees of freedom, ids expected less than 5 times merged."""
    wanted = probs * counts.sum()
    rare = wanted < 5
    seen, wanted = (
        torch.cat([counts[~rare], counts[rare].sum()[None]]),
        torch.cat([wanted[~rare], wanted[rare].sum()[None]]),
    )
    keep = wanted > 0
    return float(((seen - wanted)[keep] ** 2 / wanted[keep]).sum()), max(int(keep.sum()) - 1, 0)


def excess(counts: Tensor, probs: Tensor) -> float:
    """(χ² − df) / √(2 df), summed over the rows of `counts`, `probs` `[..., V]`."""
    rows = zip(counts.view(-1, counts.shape[-1]), probs.view(-1, probs.shape[-1]), strict=True)
    parts = [chi_square(own, law) for own, law in rows]
    degrees = sum(df for _, df in parts)
    return (sum(statistic for statistic, _ in parts) - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    ("vocab", "trials", "lot", "reads_are_free"),
    [(4096, 40_000, 80, True), (16, 200_000, 1000, True), (16, 20_000, 1000, False)],
)
def test_wide_and_narrow_vocabularies(vocab: int, trials: int, lot: int, reads_are_free: bool) -> None:
    assert excess(*emitted_first(vocab, trials, SamplingParams(), lot, reads_are_free)) < 5


def emitted_in_chains(
    vocab: int, trials: int, lot: int, reads_are_free: bool, kernel: bool = True
) -> tuple[Tensor, Tensor]:
    """Count what chains of two and three drafted tokens emit: `[3, V, V]`, each token (last) after each other one at
    the first three emitted positions, and the law p(token | token before) `[V, V]`; the text ends with token 0.

    Token by token: whether one stands depends on nothing that comes after it, so what is emitted next follows p as if
    alone. In a block it depends on the whole, and the law of what follows is right only over all further steps.
    """
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(vocab, vocab, generator=generator)
    q = torch.softmax(logits + torch.randn(vocab, vocab, generator=generator), -1)
    sampler = TokenSampler(
        vocab, CPU, seed=5, reads_are_free=reads_are_free, verification="exact_by_token", kernel=kernel
    )
    counts = torch.zeros(3, vocab, vocab)
    owner, lengths = row("x", SamplingParams()), [2 + b % 2 for b in range(lot)]
    for _ in range(trials // lot):
        texts = [torch.zeros(lot, dtype=torch.int64)]
        for _ in range(3):
            texts.append(torch.multinomial(q[texts[-1]], 1, generator=generator)[:, 0])
        drafted = torch.stack(texts, 1)
        windows = [
            VerificationWindow(owner, TokenTree.chain(tokens[1 : 1 + length].tolist(), DraftProbs(q[tokens[:length]])))
            for tokens, length in zip(drafted, lengths, strict=True)
        ]
        rows = torch.cat([logits[tokens[: 1 + length]] for tokens, length in zip(drafted, lengths, strict=True)])
        for window, judgement in zip(windows, sampler.verify(rows, windows), strict=True):
            assert judgement.verdict is not None
            path, own, _ = judgement.verdict
            written = [0, *(window.tree.tokens[node] for node in path), own]
            for place, (before, after) in enumerate(pairwise(written[:4])):
                counts[place, before, after] += 1
    return counts, torch.softmax(logits, -1)


@pytest.mark.parametrize(("trials", "reads_are_free"), [(20_000, True), (8_000, False)])
def test_every_token_that_chains_emit_follows_the_target(trials: int, reads_are_free: bool) -> None:
    counts, law = emitted_in_chains(16, trials, 500, reads_are_free)
    assert bool((counts.sum((1, 2)) > trials / 4).all()), "many tokens stand"
    assert [excess(own, law) < 5 for own in counts] == [True] * 3


def test_second_tokens_from_the_wrong_row_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of a chain's second token taken from the first one's draft distribution."""
    original = DrawnRows.probs_of

    def mutant(self: DrawnRows, nodes: Tensor, elder: Tensor | None) -> Tensor:
        firsts = self.rows.unique()[1:2]
        at = (self.rows[:, None] == firsts).nonzero()[:1, 0]
        return original(self, torch.where(self.rows[nodes] >= 0, at, nodes), elder)

    monkeypatch.setattr(DrawnRows, "probs_of", mutant)
    counts, law = emitted_in_chains(16, 10_000, 500, True, kernel=False)
    assert excess(counts[0], law) < 5
    assert excess(counts[1], law) > 20


def emitted_by_trees(vocab: int, trials: int, lot: int) -> tuple[Tensor, Tensor]:
    """As `emitted_first`, from two drafted tokens side by side, drawn without replacement."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    draft_probs = torch.softmax(-logits, -1)
    table = DraftProbs(draft_probs[None])
    sampler, generator = TokenSampler(vocab, CPU, seed=5), torch.Generator().manual_seed(6)
    counts, owner, rows = torch.zeros(vocab), row("x", SamplingParams()), logits.expand(3 * lot, -1)
    for _ in range(trials // lot):
        drafted = torch.multinomial(draft_probs.expand(lot, -1), 2, generator=generator).tolist()
        trees = [TokenTree(tuple(two), (SiblingGroup(ROOT, (0, 1), drawn_from=table),)) for two in drafted]
        judgements = sampler.verify(rows, [VerificationWindow(owner, tree) for tree in trees])
        verdicts = [judgement.verdict for judgement in judgements if judgement.verdict is not None]
        first = [
            tree.tokens[verdict.path[0]] if verdict.path else verdict.next_token
            for tree, verdict in zip(trees, verdicts, strict=True)
        ]
        counts += torch.bincount(torch.tensor(first), minlength=vocab)
    return counts, torch.softmax(logits, -1)


def test_trees_over_a_wide_vocabulary() -> None:
    assert excess(*emitted_by_trees(4096, 40_000, 100)) < 5


def test_a_verifier_that_forgets_the_residual_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RejectionRule, "residual", lambda self, p, *rest: p)
    assert excess(*emitted_first(16, 20_000, SamplingParams(), 1000, kernel=False)) > 20


@pytest.mark.parametrize("kernel", [True, False])
def test_a_residual_on_the_acceptance_stream_is_found_out(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    original = sampling.draw_uniforms
    last: list[Tensor] = []

    def shared(stream: torch.Generator, shape: tuple[int, ...], device: torch.device) -> Tensor:
        if last:
            return last.pop()[1::2]  # those of the drafted tokens
        last.append(original(stream, shape, device))
        return last[0]

    monkeypatch.setattr(sampling, "draw_uniforms", shared)
    assert excess(*emitted_first(16, 20_000, SamplingParams(), 1000, kernel=kernel)) > 20


@pytest.mark.parametrize("reads_are_free", [True, False])
def test_nothing_left_to_write_is_that_requests_failure_alone(reads_are_free: bool) -> None:
    params = [SamplingParams(allowed_token_ids=[4], bad_word_ids=[[4]]), SamplingParams()]
    rows = [row("a", params[0]), row("b", params[1])]
    rows[0].bad_words = ((4,),)
    judgements = TokenSampler(10, CPU, reads_are_free=reads_are_free).verify(
        torch.randn(2, 10), [VerificationWindow(r, TokenTree()) for r in rows]
    )
    assert [judgement.verdict is None for judgement in judgements] == [True, False]


@pytest.mark.parametrize("reads_are_free", [True, False])
def test_numbers_that_are_none_off_the_path_are_reported_and_harmless(reads_are_free: bool) -> None:
    """The drafted token is rejected, so what the target thinks after it does not matter, but was written."""
    logits = torch.zeros(2, 10)
    logits[0, 3] = 50.0
    logits[1] = torch.nan
    window = VerificationWindow(row("a", SamplingParams(temperature=0.0)), TokenTree.chain([7]))
    (judgement,) = TokenSampler(10, CPU, reads_are_free=reads_are_free).verify(logits, [window])
    assert judgement.verdict == TreeVerdict((), 3)
    assert not judgement.sound


@pytest.mark.parametrize(("reads_are_free", "kernel"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("own", [{"temperature": 0.0}, {}, {"seed": 3}])
@pytest.mark.parametrize("is_drawn", [True, False])
def test_an_accepted_token_that_nothing_can_follow_is_written(
    reads_are_free: bool, kernel: bool, own: dict[str, Any], is_drawn: bool
) -> None:
    """Drafted 7, 8, 9, all probable, and NaN behind 8: 7 and 8 stand as without a draft, and the request fails next."""
    logits = torch.full((4, 10), -50.0)
    logits[torch.arange(3), [7, 8, 9]] = 50.0
    logits[2] = torch.nan
    table = DraftProbs(torch.softmax(logits[[0, 1, 3]], -1)) if is_drawn else None
    window = VerificationWindow(row("a", SamplingParams(**own)), TokenTree.chain([7, 8, 9], table))
    (judgement,) = TokenSampler(10, CPU, reads_are_free=reads_are_free, kernel=kernel).verify(logits, [window])
    assert judgement.verdict == TreeVerdict((0,), 8)
    assert not judgement.sound


@pytest.mark.parametrize("reads_are_free", [True, False])
@pytest.mark.parametrize("kept", [None, torch.arange(0, 10, 2)])
def test_nan_in_one_rows_draft_reaches_no_other_row(reads_are_free: bool, kept: Tensor | None) -> None:
    """All drafted rows share a table of distributions, and the first row's are NaN."""
    width = 10 if kept is None else len(kept)
    table = DraftProbs(torch.full((2, width), 1 / width), kept)
    broken = DraftProbs(table.probs.clone().index_fill_(0, torch.tensor([0]), torch.nan), kept)
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(4))
    found = []
    for own in (table, broken):
        trees = [TokenTree(), TokenTree.chain([4], own, [1]), TokenTree.chain([6]), TokenTree()]
        windows = [VerificationWindow(row(str(b), SamplingParams()), tree) for b, tree in enumerate(trees)]
        rows = torch.cat([logits, logits[:1]])
        sampler = TokenSampler(10, CPU, seed=3, reads_are_free=reads_are_free)
        found.append([[judgement.verdict for judgement in sampler.verify(rows, windows)] for _ in range(50)])
    assert found[0] == found[1]
    assert {len(verdicts[1].path) for verdicts in found[0]} == {0, 1}, "accepted and rejected"
