"""Trees through the whole engine: mask, positions, the accepted path's cache, and the distribution."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.sampling import policy_probs
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import ROOT, DraftProbs, SiblingGroup, TokenTree
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.base import BatchView, LengthController, Plan, RowPlan, StepResult
from distillspec.serving.control.fixed import FixedTree
from distillspec.serving.control.named import ControllerParts, make_controller
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.serving.proposers.base import EMPTY, ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.server.bridge.request_stream import kinds
from distillspec.serving.step.commit import Emission
from distillspec.types import SamplingPolicy

from ..models.state_drafts import drafted_logits, state_draft
from .conftest import MakeEngine, hf_greedy, prompts, ticks
from .test_engine_sampling import POLICIES, PROMPT, excess

Grow = Callable[[ProposalRequest], TokenTree]


class Gardener:
    """A proposer that grows any tree."""

    version = ""

    def __init__(self, grow: Grow) -> None:
        self.grow = grow

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [self.grow(request) for request in requests]

    def most_nodes(self, depth: int) -> int:
        return 3 * depth

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None: ...

    def leave_slot(self, sequence: SequenceState) -> None: ...


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
@pytest.mark.parametrize("kind", ["tiny", "mistral"])
def test_trees_in_the_triton_kernel(
    target: LanguageModel, random_model: Callable[[str], LanguageModel], make_engine: MakeEngine, kind: str
) -> None:
    """On CPUs under its interpreter: with and without a sliding window, three rows of unlike lengths."""
    model = target if kind == "tiny" else random_model(kind)
    asked = prompts(3)
    expected = [hf_greedy(model, prompt, 8) for prompt in asked]
    wanted = {tuple(prompt): tokens for prompt, tokens in zip(asked, expected, strict=True)}
    grown = Gardener(right_one_last(wanted))
    engine = make_engine(model=model, proposer_object=grown, speculation_length=3, max_slots=3, attention="triton")
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
    cache, moved = engine.runner.cache, list[tuple[list[int], int]]()
    gather = cache.gather

    def noted(slot: int, places: torch.Tensor, start: int) -> None:
        moved.append((places.tolist(), start))
        before = [held[slot].clone() for layer in cache.layers.values() for held in layer]
        gather(slot, places, start)
        after = [held[slot] for layer in cache.layers.values() for held in layer]
        changed = {int(i) for was, now in zip(before, after, strict=True) for i in (was != now).nonzero()[:, 1]}
        assert changed == {start}

    monkeypatch.setattr(cache, "gather", noted)
    (output,) = engine.generate([prompt], params)
    assert output.token_ids == expected.token_ids
    first = len(prompt) + 1  # the prompt's own last step wrote one token, and a window's root is before its nodes
    assert moved == [([start + 3], start) for start in range(first + 2, first + 19, 4)]


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


SHAPES = {
    "siblings": TreeShape.spine((3, 2, 2)),
    "full": TreeShape.full((2, 2, 2)),
    "fork": TreeShape.full((3, 1, 1)),
    "uneven": TreeShape(((2,), (0, 2), (1, 1))),
}
DRAFTS = ("tokens", "truncated", "eagle", "features", "medusa", "hydra", "block")


class TakesTurns(LengthController):
    """Another shape for each row and step, so that rows of one step have unlike ones."""

    speculation_length = 3
    most_nodes = max(shape.nodes for shape in SHAPES.values())

    def __init__(self) -> None:
        self.shapes, self.steps = [*SHAPES.values(), TreeShape.full((1, 1)), TreeShape()], 0

    def plan(self, view: BatchView) -> Plan:
        rows = enumerate(view.rows, self.steps)
        return Plan(tuple([RowPlan.of(row, self.shapes[turn % len(self.shapes)]) for turn, row in rows]))

    def observe(self, result: StepResult) -> None:
        self.steps += 1


def tree_draft(kind: str, target: LanguageModel) -> LanguageModel:
    """Return a draft that is often right, and often second."""
    kept_ids = torch.arange(0, 250, 2) if kind == "truncated" else None
    if kind in ("tokens", "truncated"):
        draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept_ids)
        draft.model.to(target.dtype)
        return draft
    return state_draft(kind, target, noise=0.02)


@pytest.mark.numerics
@pytest.mark.parametrize("shape", [*SHAPES, "in turn"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("seed", [None, 7])
def test_grown_trees_change_no_greedy_and_no_seeded_token(
    random_model: Callable[..., LanguageModel], kind: str, shape: str, seed: int | None
) -> None:
    """In float64, with rows that are preempted and prompts that are read in chunks."""
    target = random_model("llama", torch.float64)
    params = SamplingParams(temperature=float(seed is not None), seed=seed, max_tokens=24, ignore_eos=True)
    room: dict[str, Any] = {"max_slots": 3, "max_model_len": 128, "prefill_chunk": 16, "compile": False}
    asked = [prompt[:60] for prompt in prompts()]
    plain = Engine(target, None, EngineSettings(**room))
    expected = [output.token_ids for output in plain.generate(asked, params)]
    plain.close()
    controller = TakesTurns() if shape == "in turn" else FixedTree(SHAPES[shape])
    settings = EngineSettings(**room, max_cache_tokens=150, speculation_length=3)
    engine = Engine(target, tree_draft(kind, target), settings, controller=controller)
    trials: Counter[tuple[int, bool]] = Counter()
    engine.observer = lambda seen, logits: trials.update((t.rank, t.accepted) for e in seen for t in e.trials)
    outputs = engine.generate(asked, params)
    engine.check_integrity()
    engine.close()
    assert [output.token_ids for output in outputs] == expected
    assert trials[0, True] > 0
    further = {rank: accepted for (rank, accepted) in sorted(trials) if rank}
    assert further, "siblings were tried"
    assert any(further.values()) or kind in ("hydra", "block"), "and accepted, but for drafts that are seldom right"
    assert sum(output.stats.preemptions for output in outputs) > 0


@pytest.mark.parametrize("kind", ["tokens", "eagle", "medusa"])
def test_a_grown_trees_paths_are_the_drafts_own_chains(random_model: Callable[..., LanguageModel], kind: str) -> None:
    """Greedy: the children of every node are what the draft finds most probable behind the text and the path to it."""
    target = random_model("llama", torch.float64)
    draft = tree_draft(kind, target)
    settings = EngineSettings(max_slots=2, max_model_len=128, compile=False, speculation_length=3)
    engine = Engine(target, draft, settings, controller=FixedTree(TreeShape(((3,), (2, 2, 0), (1, 0, 1, 1)))))
    seen: list[tuple[list[int], TokenTree]] = []
    assert isinstance(engine.proposer, DraftModel)
    plain = engine.proposer.propose

    def noted(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        trees = plain(requests)
        seen.extend((list(r.sequence.tokens), tree) for r, tree in zip(requests, trees, strict=True))
        return trees

    engine.proposer.propose = noted  # type: ignore[method-assign]
    engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    engine.close()
    whole = [(text, tree) for text, tree in seen if len(tree) == 10]
    assert len(whole) > 4
    for text, tree in whole[:: len(whole) // 4]:
        for node in (ROOT, *range(len(tree))):
            if children := tree.children.get(node):
                path = [tree.tokens[each] for each in tree.path(node)]
                logits = _behind(draft, target, text, path)
                assert [tree.tokens[child] for child in children] == logits.topk(len(children)).indices.tolist()


def _behind(draft: LanguageModel, target: LanguageModel, text: list[int], path: list[int]) -> torch.Tensor:
    """Return the draft's logits behind a text and a path of its own tokens."""
    if draft.state_input is not None:
        return drafted_logits(draft, target, text, [*path, 0])[-1]
    with torch.no_grad():
        return draft.logits(torch.tensor([[*text, *path]]))[0, -1]


@pytest.mark.parametrize(
    ("kind", "shape", "policy", "tree"),
    [
        *product(["truncated", "eagle"], ["siblings", "in turn"], ["plain"], ["sampled"]),
        ("eagle", "in turn", "penalised", "sampled"),
        ("features", "full", "plain", "sampled"),
        ("medusa", "full", "warm", "sampled"),
        ("block", "siblings", "plain", "sampled"),
        ("truncated", "siblings", "plain", "topk"),
        ("eagle", "full", "plain", "topk"),
    ],
)
def test_grown_trees_keep_the_distribution(
    target: LanguageModel, make_engine: MakeEngine, kind: str, shape: str, policy: str, tree: str
) -> None:
    controller = TakesTurns() if shape == "in turn" else FixedTree(SHAPES[shape])
    engine = make_engine(
        tree_draft(kind, target), controller_object=controller, speculation_length=3, max_slots=64, tree=tree
    )
    accepted: Counter[int] = Counter()

    def noted(step: int) -> None:
        rows = [] if engine.last_result is None else engine.last_result.rows
        accepted.update(trial.rank for row in rows for trial in row.trials if trial.accepted)

    assert float(excess(engine, target, POLICIES[policy], requests=1200, between_steps=noted).max()) < 5
    assert sum(count for rank, count in accepted.items() if rank) > 5


@pytest.mark.parametrize("controller", ["goodput", "fixed"])
@pytest.mark.parametrize(
    ("kind", "tree", "widths"),
    [
        *product(["eagle", "tokens", "block"], ["sampled", "topk", "dynamic"], [()]),
        *product(["features"], ["sampled", "topk"], [(3, 2)]),
        *product(["medusa", "hydra"], ["medusa", "dynamic"], [()]),
        ("eagle", "fork", (3,)),
        ("truncated", "given", (2, 2, 1)),
    ],
)
def test_every_tree_by_its_name_changes_no_token(
    random_model: Callable[..., LanguageModel], kind: str, tree: str, widths: tuple[int, ...], controller: str
) -> None:
    target = random_model("llama", torch.float64)
    room: dict[str, Any] = {"max_slots": 3, "max_model_len": 128, "compile": False, "measure_costs_s": 0.0}
    plain = Engine(target, None, EngineSettings(**room))
    asked = prompts(5)
    mixed = [
        SamplingParams(temperature=float(turn % 2), seed=turn if turn % 2 else None, max_tokens=20, ignore_eos=True)
        for turn in range(5)
    ]
    expected = _answers(plain, asked, mixed)
    settings = EngineSettings(
        **room, controller=controller, speculation_length=3, tree=tree, widths=list(widths), nodes=15
    )
    engine = Engine(target, tree_draft(kind, target), settings)
    engine.clock = ticks()
    if controller == "goodput":
        engine.use_controller(make_controller("goodput", ControllerParts(3, FREE, settings=settings), {}))
    nodes: list[int] = []
    engine.observer = lambda seen, logits: nodes.extend(len(e.tree) for e in seen)
    assert _answers(engine, asked, mixed) == expected
    assert 3 < max(nodes) <= 15 or (controller == "fixed" and tree in ("sampled", "topk") and not widths)


FREE = LatencyModel(CostTable.line(0.0, 1e-6, 1.0), CostTable.line(0.0, 1e-6, 1e-3))  # nearly, for further tokens


def _answers(engine: Engine, asked: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    for number, (prompt, own) in enumerate(zip(asked, params, strict=True)):
        engine.submit(Request(str(number), tuple(prompt), own))
    found = {}
    while engine.has_work:
        found |= {output.request_id: list(output.token_ids) for output in engine.step().finished}
    engine.check_integrity()
    engine.close()
    return [found[str(number)] for number in range(len(asked))]


def test_a_dynamic_tree_holds_the_most_confident_nodes(random_model: Callable[..., LanguageModel]) -> None:
    """Those of the highest product of the draft's probabilities, among the children of each level's best."""
    target = random_model("llama", torch.float64)
    draft = tree_draft("tokens", target)
    settings = EngineSettings(
        max_slots=1, compile=False, controller="fixed", speculation_length=2, tree="dynamic", widths=[3, 3], nodes=5
    )
    engine = Engine(target, draft, settings)
    assert isinstance(engine.proposer, DraftModel)
    plain, seen = engine.proposer.propose, list[tuple[list[int], TokenTree]]()

    def noted(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        (tree,) = plain(requests)
        seen.append((list(requests[0].sequence.tokens), tree))
        return [tree]

    engine.proposer.propose = noted  # type: ignore[method-assign]
    engine.generate(prompts(1), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    engine.close()
    shapes = set()
    for text, tree in [each for each in seen if len(each[1]) == 5]:
        first = torch.log_softmax(_behind(draft, target, text, []), -1).topk(3)
        scores = {(token,): score for token, score in zip(first.indices.tolist(), first.values.tolist(), strict=True)}
        for path, score in list(scores.items()):
            below = torch.log_softmax(_behind(draft, target, text, list(path)), -1).topk(3)
            pairs = zip(below.indices.tolist(), below.values.tolist(), strict=True)
            scores |= {(*path, token): score + own for token, own in pairs}
        best = sorted(scores, key=lambda path: -scores[path])[:5]
        assert {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(5)} == set(best)
        shapes.add(tree.parents)
    assert len(shapes) > 1, "the shape follows the draft's confidence"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": "wide"}, "tree=wide"),
        ({"tree": "given"}, r"tree=given needs widths=\[4,2,…\]"),
        ({"tree": "fork", "widths": [2, 2]}, r"tree=fork needs widths=\[W\]"),
        ({"tree": "given", "widths": [4, 4, 4]}, "has 84 tokens, above nodes=32; give nodes=84"),
        ({"tree": "topk", "widths": [0, 1]}, "must be at least 1 each"),
        ({"tree": "off", "widths": [2]}, "need a tree"),
        ({"widths": [2] * 5}, "of 5 levels, above speculation_length=4; raise it to 5"),
        ({"nodes": 0}, "nodes=0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**settings)


def test_a_medusa_tree_needs_heads(target: LanguageModel, draft: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="tree=medusa needs a draft of kind medusa, not"):
        Engine(target, draft, EngineSettings(tree="medusa"))
