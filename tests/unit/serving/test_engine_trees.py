"""Trees through the whole engine: mask, positions, the accepted path's cache, and the distribution."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer
from distillspec.serving.server.bridge.request_stream import kinds
from distillspec.serving.step.commit import Emission
from distillspec.types import SamplingPolicy

from .conftest import INTERPRETED, MakeEngine, hf_greedy, prompts
from .test_engine_sampling import POLICIES, PROMPT, excess

Grow = Callable[[ProposalRequest], TokenTree]


class Gardener(Proposer):
    """A proposer that grows any tree."""

    def __init__(self, grow: Grow) -> None:
        self.grow = grow

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [self.grow(request) for request in requests]

    def most_nodes(self, depth: int) -> int:
        return 3 * depth


def right_one_last(wanted: dict[tuple[int, ...], list[int]]) -> Grow:
    """Width three, depth up to three: at every depth two wrong tokens stand before the one that greedy decoding
    writes."""

    def grow(request: ProposalRequest) -> TokenTree:
        sequence = request.sequence
        done = sequence.output_length
        coming = wanted[sequence.request.prompt_ids][done : done + min(3, request.speculation_length)]
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in coming:
            tokens += [(token + 1) % 200, (token + 2) % 200, token]
            parents += [parent] * 3
            parent = len(tokens) - 1
        return TokenTree.of_parents(tokens, parents) if tokens else EMPTY

    return grow


@pytest.mark.parametrize("kind", ["tiny", "mistral", "gemma3_text"])
def test_the_right_branch_is_found_and_its_cache_is_right(
    target: LanguageModel, random_model: Callable[[str], LanguageModel], make_engine: MakeEngine, kind: str
) -> None:
    model = target if kind == "tiny" else random_model(kind)
    asked = prompts(5)
    expected = [hf_greedy(model, prompt, 20) for prompt in asked]
    wanted = {tuple(prompt): tokens for prompt, tokens in zip(asked, expected, strict=True)}
    engine = make_engine(
        model=model, proposer_object=Gardener(right_one_last(wanted)), speculation_length=3, max_slots=3
    )
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=20))
    assert [list(output.token_ids) for output in outputs] == expected
    whole = [o for o in outputs if len(o.token_ids) == 20]
    assert whole
    assert all(output.stats.steps <= 7 for output in whole), "three of three levels stand in every step"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.usefixtures("no_kernel_trial")
@pytest.mark.parametrize("kind", ["tiny", "mistral"])
def test_trees_in_the_triton_kernel(
    shallow_target: LanguageModel, random_model: Callable[..., LanguageModel], make_engine: MakeEngine, kind: str
) -> None:
    """On CPUs under its interpreter: with and without a sliding window, three rows of unlike lengths."""
    model = shallow_target if kind == "tiny" else random_model(kind, layers=2)
    asked = [prompt[:30] for prompt in prompts(3)]
    expected = [hf_greedy(model, prompt, 8) for prompt in asked]
    wanted = {tuple(prompt): tokens for prompt, tokens in zip(asked, expected, strict=True)}
    grown = Gardener(right_one_last(wanted))
    engine = make_engine(model=model, proposer_object=grown, speculation_length=3, max_slots=3, **INTERPRETED)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=8))
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.accepted for output in outputs) > 10


def test_wide_trees_at_the_contexts_end_lose_levels_not_correctness(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    prompt = prompts()[1]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    plain = make_engine(max_model_len=len(prompt) + 20)
    (expected,) = plain.generate([prompt], params)
    plain.close()
    grow = right_one_last({tuple(prompt): list(expected.token_ids)})
    engine = make_engine(max_model_len=len(prompt) + 20, proposer_object=Gardener(grow), speculation_length=3)
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == expected.token_ids
    assert len(output.token_ids) == 20


def test_every_node_of_wide_trees_is_reserved(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget for two rows and their nine nodes each: the third waits or is preempted, and nothing exceeds it."""
    asked = [prompts()[1][:20]] * 3
    expected = hf_greedy(target, asked[0], 20)
    gardener = Gardener(right_one_last({tuple(asked[0]): expected}))
    engine = make_engine(proposer_object=gardener, speculation_length=3, max_cache_tokens=75)
    assert (engine.limits.lookahead, engine.limits.extra) == (3, 6)
    read, places = engine.runner.read, list[int]()

    def noted(rows: list[RowInput]) -> torch.Tensor:
        places.append(sum(row.start + len(row.tokens) for row in rows))
        return read(rows)

    monkeypatch.setattr(engine.runner, "read", noted)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=20))
    assert [list(output.token_ids) for output in outputs] == [expected] * 3
    assert max(places) <= 75
    assert sum(output.stats.preemptions for output in outputs) > 0


def drawn_without_replacement(draft: LanguageModel, generator: torch.Generator) -> Grow:
    """Three children of the root, and two of the first of them, from an uncached pass of the draft."""

    def grow(request: ProposalRequest) -> TokenTree:
        text = request.sequence.tokens
        root = _probs(draft, text)
        tokens = torch.multinomial(root, 3, generator=generator).tolist()
        if request.speculation_length == 1:
            return TokenTree(tuple(tokens), (SiblingGroup(ROOT, (0, 1, 2), drawn_from=DraftProbs(root[None])),))
        below = _probs(draft, [*text, tokens[0]])
        tokens += torch.multinomial(below, 2, generator=generator).tolist()
        drawn = DraftProbs(torch.stack([root, below]))
        groups = SiblingGroup(ROOT, (0, 1, 2), drawn_from=drawn), SiblingGroup(0, (3, 4), drawn_from=drawn, row=1)
        return TokenTree(tuple(tokens), groups)

    return grow


def _probs(draft: LanguageModel, text: list[int]) -> torch.Tensor:
    return policy_probs(draft.logits(torch.tensor([text]))[0, -1], SamplingPolicy())


def test_sampled_trees_keep_the_targets_distribution(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    """The probability integral transform of the first three emitted positions is uniform (ten bins)."""
    prompt, count = prompts()[1][:9], 800
    grow = drawn_without_replacement(draft, torch.Generator().manual_seed(1))
    engine = make_engine(proposer_object=Gardener(grow), speculation_length=2, max_slots=32)
    outputs = engine.generate([prompt] * count, SamplingParams(max_tokens=3, ignore_eos=True))
    assert sum(output.stats.accepted for output in outputs) > count / 10
    engine.close()
    written = torch.tensor([output.token_ids for output in outputs])
    texts = torch.cat([torch.tensor([prompt]).expand(count, -1), written], 1)
    with torch.no_grad():
        probs = policy_probs(target.logits(texts)[:, len(prompt) - 1 : -1], SamplingPolicy()).double()
    chosen = probs.gather(-1, written[..., None])[..., 0]
    below = probs.cumsum(-1).gather(-1, written[..., None])[..., 0] - chosen
    places = below + torch.rand(below.shape, dtype=torch.float64) * chosen
    counts = torch.stack([torch.histc(column, 10, 0, 1) for column in places.T])
    excess = (((counts - count / 10) ** 2 / (count / 10)).sum(-1) - 9) / 18**0.5
    assert float(excess.max()) < 5


def drawn_from_table(table: torch.Tensor, generator: torch.Generator) -> Grow:
    """As `drawn_without_replacement`, each token from `table[token before]`."""

    def grow(request: ProposalRequest) -> TokenTree:
        root = table[request.sequence.tokens[-1]]
        tokens = torch.multinomial(root, 3, generator=generator).tolist()
        if request.speculation_length == 1:
            return TokenTree(tuple(tokens), (SiblingGroup(ROOT, (0, 1, 2), drawn_from=DraftProbs(root[None])),))
        below = table[tokens[0]]
        tokens += torch.multinomial(below, 2, generator=generator).tolist()
        drawn = DraftProbs(torch.stack([root, below]))
        groups = SiblingGroup(ROOT, (0, 1, 2), drawn_from=drawn), SiblingGroup(0, (3, 4), drawn_from=drawn, row=1)
        return TokenTree(tuple(tokens), groups)

    return grow


@pytest.mark.parametrize("policy", ["warm", "penalised"])
def test_sampled_trees_keep_the_distribution_of_every_policy(
    target: LanguageModel, make_engine: MakeEngine, policy: str
) -> None:
    """Filters, and penalties that differ by branch. Drafts come from the target without either, but warmer."""
    vocab = target.identity.vocab_size
    with torch.no_grad():
        texts = torch.cat([torch.tensor([PROMPT]).expand(vocab, -1), torch.arange(vocab)[:, None]], 1)
        table = policy_probs(target.logits(texts)[:, -1], SamplingPolicy(1.3))
    grow = drawn_from_table(table, torch.Generator().manual_seed(1))
    engine = make_engine(proposer_object=Gardener(grow), speculation_length=2, max_slots=64)
    accepted: list[int] = []

    def noted(step: int) -> None:
        result = engine.last_result
        if result is not None:
            accepted.extend(row.accepted for row in result.rows)

    assert float(excess(engine, target, POLICIES[policy], requests=800, between_steps=noted).max()) < 5
    assert sum(accepted) > 100


def test_only_what_stands_further_back_is_moved(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path (0, 1, 5): the first two nodes stand where they must, one place is moved."""
    prompt = prompts()[1]
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    plain = make_engine()
    (expected,) = plain.generate([prompt], params)
    plain.close()

    def grow(request: ProposalRequest) -> TokenTree:
        done = request.sequence.output_length
        coming = list(expected.token_ids[done : done + request.speculation_length])
        if len(coming) < 3:
            return TokenTree.chain(coming)
        wrong = [(coming[2] + i) % 200 for i in (1, 2, 3)]
        return TokenTree.of_parents((*coming[:2], *wrong, coming[2]), (ROOT, 0, 1, 1, 1, 1))

    engine = make_engine(proposer_object=Gardener(grow), speculation_length=3)
    cache, moved = engine.runner.cache, list[list[list[int]]]()
    gather = cache.gather

    def noted(moves: torch.Tensor) -> None:
        moved.append(moves.tolist())
        before = [held.clone() for layer in cache.layers.values() for held in layer]
        gather(moves)
        after = [held for layer in cache.layers.values() for held in layer]
        pairs = zip(before, after, strict=True)
        changed = {tuple(at) for was, now in pairs for at in (was != now).nonzero()[:, ::2].tolist()}
        slots, _, places = moves.tolist()
        assert changed == set(zip(slots, places, strict=True))

    monkeypatch.setattr(cache, "gather", noted)
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == expected.token_ids
    first = len(prompt) + 1  # the prompt's own last step wrote one token, and a window's root is before its nodes
    assert moved == [[[0], [start + 3], [start]] for start in range(first + 2, first + 19, 4)]


def test_a_wide_trees_acceptance_is_counted_by_level(target: LanguageModel, make_engine: MakeEngine) -> None:
    """Three nodes a level: every level is accepted, so nothing that was tried was rejected."""
    prompt = prompts()[1]
    expected = hf_greedy(target, prompt, 40)
    gardener = Gardener(right_one_last({tuple(prompt): expected}))
    engine = make_engine(proposer_object=gardener, speculation_length=3)
    engine.submit(Request("a", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=len(expected))))
    estimate, rows = AcceptanceEstimate(4, width=3), list[RowResult]()
    while engine.has_work:
        result = engine.step().result
        rows += [row for row in result.rows if row.nodes] if result is not None else []
    estimate.observe(rows)
    assert [row.nodes for row in rows[:5]] == [9] * 5, "the nodes, which are what verification costs"
    assert all(row.tried == row.accepted and not row.rejected for row in rows)
    assert estimate.hazards()[0] < 0.5 < estimate.sibling_shares()[0, 1], "the third of each level is right"
    assert kinds(4, rows[0]) == ("accepted", "accepted", "accepted", "bonus")


def test_an_accepted_leaf_above_the_deepest_level_rejects_nothing(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    """Its sibling's children were never tried."""
    prompt = prompts()[1]
    expected = hf_greedy(target, prompt, 20)

    def grow(request: ProposalRequest) -> TokenTree:
        right = expected[request.sequence.output_length]
        wrong = (right + 1) % 200
        return TokenTree.of_parents((wrong, right, wrong), (ROOT, ROOT, 0))

    engine = make_engine(proposer_object=Gardener(grow), speculation_length=2)
    emissions: list[Emission] = []
    engine.observer = lambda seen, logits: emissions.extend(seen)
    engine.submit(Request("a", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=12)))
    rows: list[RowResult] = []
    while engine.has_work:
        result = engine.step().result
        rows += [row for row in result.rows if row.nodes] if result is not None else []
    assert len(rows) == 5
    for row, emission in zip(rows, emissions[1:6], strict=True):  # the first token comes with the prompt
        assert (row.depth, row.nodes, row.accepted) == (2, 3, 1)
        assert row.trials == emission.trials == (Trial(1, 0, "draft", False), Trial(1, 1, "draft", True))
        assert kinds(2, row) == ("accepted", "bonus")
