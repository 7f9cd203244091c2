"""Trees that drafts grow, through the whole engine: every kind, every shape, every name of `engine.tree`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedTree
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.control.by_name import ControllerParts, make_controller
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel

from ..models.state_drafts import drafted_logits, state_draft
from .conftest import MakeEngine, prompts, ticks
from .test_engine_sampling import POLICIES, excess

SHAPES = {
    "siblings": TreeShape.spine((3, 2, 2)),
    "full": TreeShape.full((2, 2, 2)),
    "fork": TreeShape.full((3, 1, 1)),
    "uneven": TreeShape(((2,), (0, 2), (1, 1))),
}
MIXED = [  # greedy and seeded requests side by side
    SamplingParams(temperature=float(turn % 2), seed=turn if turn % 2 else None, max_tokens=24, ignore_eos=True)
    for turn in range(8)
]
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


Plain = Callable[[dict[str, Any], Sequence[list[int]], Sequence[SamplingParams]], list[list[int]]]


@pytest.fixture(scope="module")
def plain(random_model: Callable[..., LanguageModel]) -> Plain:
    """`plain(settings, prompts, params)`: answers without a draft in float64. Many tests have the same ones."""
    known: dict[str, list[list[int]]] = {}

    def answer(
        settings: dict[str, Any], asked: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        if (key := repr((settings, asked, params))) not in known:
            engine = Engine(random_model("llama", torch.float64), None, EngineSettings(**settings))
            known[key] = _answers(engine, asked, params)
        return known[key]

    return answer


def tree_draft(kind: str, target: LanguageModel) -> LanguageModel:
    """Return a draft that is often right, and often second."""
    kept_ids = torch.arange(0, 250, 2) if kind == "truncated" else None
    if kind in ("tokens", "truncated"):
        draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept_ids)
        draft.model.to(target.dtype)
        return draft
    return state_draft(kind, target, noise=0.02)


@pytest.mark.parametrize(
    ("kind", "shape"), [*product(DRAFTS, ["in turn"]), *product(["eagle", "block"], SHAPES), ("medusa", "full")]
)
def test_grown_trees_change_no_greedy_and_no_seeded_token(
    random_model: Callable[..., LanguageModel], plain: Plain, kind: str, shape: str
) -> None:
    """In float64, with rows that are preempted and prompts that are read in chunks."""
    target = random_model("llama", torch.float64)
    room: dict[str, Any] = {"max_slots": 3, "max_model_len": 128, "prefill_chunk": 16, "compile": False}
    asked = [prompt[:60] for prompt in prompts()]
    expected = plain(room, asked, MIXED)
    controller = TakesTurns() if shape == "in turn" else FixedTree(SHAPES[shape])
    settings = EngineSettings(**room, max_cache_tokens=130, speculation_length=3)
    engine = Engine(target, tree_draft(kind, target), settings, controller=controller)
    trials: Counter[tuple[int, bool]] = Counter()
    engine.observer = lambda seen, logits: trials.update((t.rank, t.accepted) for e in seen for t in e.trials)
    preempted: list[int] = []
    assert _answers(engine, asked, MIXED, preempted) == expected
    assert sum(preempted) > 0
    assert trials[0, True] > 0
    further = {rank: accepted for (rank, accepted) in sorted(trials) if rank}
    assert further, "siblings were tried"
    assert any(further.values()) or kind in ("hydra", "block"), "and accepted, but for drafts that are seldom right"


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
        *product(["truncated", "eagle"], ["in turn"], ["plain"], ["sampled"]),
        ("eagle", "in turn", "penalised", "sampled"),
        ("features", "full", "plain", "sampled"),
        ("medusa", "full", "warm", "sampled"),
        ("block", "siblings", "plain", "sampled"),
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
    random_model: Callable[..., LanguageModel],
    plain: Plain,
    kind: str,
    tree: str,
    widths: tuple[int, ...],
    controller: str,
) -> None:
    target = random_model("llama", torch.float64)
    room: dict[str, Any] = {"max_slots": 3, "max_model_len": 128, "compile": False, "measure_costs_s": 0.0}
    asked = prompts(5)
    expected = plain(room, asked, MIXED)
    settings = EngineSettings(
        **room, controller=controller, speculation_length=3, tree=tree, widths=list(widths), nodes=15
    )
    engine = Engine(target, tree_draft(kind, target), settings)
    engine.clock = ticks()
    if controller == "goodput":
        engine.use_controller(make_controller("goodput", ControllerParts(3, FREE, settings=settings), {}))
    nodes: list[int] = []
    engine.observer = lambda seen, logits: nodes.extend(len(e.tree) for e in seen)
    assert _answers(engine, asked, MIXED) == expected
    assert 3 < max(nodes) <= 15 or (controller == "fixed" and tree in ("sampled", "topk") and not widths)


FREE = LatencyModel(CostTable.line(0.0, 1e-6, 1.0), CostTable.line(0.0, 1e-6, 1e-3))  # nearly, for further tokens


def _answers(
    engine: Engine, asked: Sequence[list[int]], params: Sequence[SamplingParams], preempted: list[int] | None = None
) -> list[list[int]]:
    """Answer the prompts, check the engine and close it. Preemptions of each request go to `preempted`."""
    for number, (prompt, own) in enumerate(zip(asked, params, strict=False)):
        engine.submit(Request(str(number), tuple(prompt), own))
    found = {}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step().finished}
    engine.check_integrity()
    engine.close()
    if preempted is not None:
        preempted += [output.stats.preemptions for output in found.values()]
    return [list(found[str(number)].token_ids) for number in range(len(asked))]


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


@pytest.mark.parametrize(("nodes", "proposers", "levels"), [(2, None, 2), (9, None, 4), (2, ["a", "b", "c"], 2)])
@pytest.mark.parametrize("tree", ["dynamic", "medusa"])
def test_a_fixed_tree_keeps_to_its_nodes(tree: str, nodes: int, proposers: list[str] | None, levels: int) -> None:
    settings = EngineSettings(tree=tree, controller="fixed", nodes=nodes, proposer=proposers, speculation_length=4)
    controller = make_controller("fixed", ControllerParts(4, settings=settings), {})
    assert isinstance(controller, FixedTree)
    assert (controller.shape.nodes, controller.speculation_length) == (nodes, levels)


def test_a_medusa_tree_needs_heads(target: LanguageModel, draft: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="tree=medusa needs a draft of kind medusa, not"):
        Engine(target, draft, EngineSettings(tree="medusa"))


@pytest.mark.parametrize("tree", ["given", "dynamic"])
@pytest.mark.parametrize("kind", ["tokens", "eagle", "medusa"])
def test_trees_at_the_contexts_end_lose_levels_not_correctness(
    random_model: Callable[..., LanguageModel], plain: Plain, kind: str, tree: str
) -> None:
    """The last tokens have fewer places than a whole tree."""
    target = random_model("llama", torch.float64)
    (prompt, *_), params = prompts(), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    room: dict[str, Any] = {"max_slots": 1, "max_model_len": len(prompt) + 24, "compile": False}
    expected = plain(room, [prompt], [params])
    settings = EngineSettings(
        **room, controller="fixed", speculation_length=3, tree=tree, widths=[3, 3, 2] if tree == "given" else [6, 6, 6]
    )
    assert _answers(Engine(target, tree_draft(kind, target), settings), [prompt], [params]) == expected
    assert len(expected[0]) == 24
