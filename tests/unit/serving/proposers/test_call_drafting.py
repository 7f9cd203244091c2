"""Trees that grow in one call of C++: those that grow level by level, node by node and number by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.few_queries import why_not
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import PlannedTree, TreeShape
from distillspec.serving.base.tree import DRAFT, TokenTree
from distillspec.serving.decoding.drafting import Draws, make_draws
from distillspec.serving.decoding.logits import Columns, Place
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.growth import TreePolicy

from ...models.middle_llama import llama
from ...models.state_drafts import state_draft
from ...models.test_draft_steps import KINDS, draft_of

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]
SHAPES = {
    "chains": (TreeShape.full((1, 1, 1, 1)),) * 3,
    "siblings": (TreeShape.spine((3, 2, 1)),) * 3,
    "trees": (TreeShape.full((2, 2, 2)),) * 3,
    "unlike": (TreeShape.full((1,)), TreeShape(((3,), (2, 0, 1), (0, 1, 2))), TreeShape(((2,), (0, 1)))),
}
GREEDY, PLAIN, COOL = (SamplingParams(temperature=t) for t in (0.0, 1.0, 0.5))
POLICIES = {
    "greedy": (GREEDY, GREEDY, GREEDY),
    "drawn": (PLAIN, SamplingParams(temperature=2.0), COOL),
    "both": (PLAIN, GREEDY, COOL),
    "filtered": (SamplingParams(top_k=5), SamplingParams(temperature=3.0, min_p=1e-4), SamplingParams(top_k=40)),
    "nucleus": (SamplingParams(top_p=0.6), SamplingParams(min_p=0.5, top_k=40), SamplingParams(top_p=0.3)),
    "seeded": (SamplingParams(seed=3), PLAIN, SamplingParams(temperature=0.7, seed=4, top_k=9)),
}


class NumberedSampler(TokenSampler):
    """Draws by numbers of the row and of the reader in it, so that all ways of drafting get the same."""

    read: Counter[str]  # readers so far, by sequence

    def draws(
        self,
        places: Sequence[Place],
        count: int,
        columns: Columns,
        siblings: int = 1,
        *,
        best: bool = False,
        device: torch.device | None = None,
    ) -> Draws:
        uniforms = torch.stack([self._next(place.sequence.id, count, siblings) for place in places])
        return make_draws(places, columns, count, uniforms, best=best)

    def proposal_uniforms(self, *shape: int) -> Tensor:
        rows, count, siblings = shape
        return torch.stack([self._next(str(row), count, siblings) for row in range(rows)])

    def _next(self, name: str, count: int, siblings: int) -> Tensor:
        first, generator = self.read[name], torch.Generator().manual_seed(int(name))
        self.read[name] += count
        return torch.rand(80, 70, generator=generator, dtype=torch.float64)[first : first + count, :siblings]


def model_of(draft: LanguageModel, vocab: int, *, in_one_call: bool, topk: bool = False) -> DraftModel:
    prepared = PreparedModel(draft, pack_weights=True, compile=False, exact=False)
    assert prepared.steps is not None
    prepared.steps = prepared.steps if in_one_call else None
    cache = SlotCache(4, 96, state_ids=draft.state_ids)
    if draft.state_input is not None:
        states = cache.kept_states(draft.head.weight, 128)
        states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(1)))
    sampler, trees = NumberedSampler(vocab, draft.device, 0), TreePolicy(most_probable=topk)
    model = DraftModel(draft, sampler, cache, prepared=prepared, trees=trees)
    model.sampler.read = Counter()  # type: ignore[attr-defined]
    model.can_draft_in_loop = lambda rows: False  # type: ignore[method-assign]
    return model


def sequences(params: Sequence[SamplingParams], stop: frozenset[int]) -> list[SequenceState]:
    texts = ([5, 6, 7], [9, 4], [11, 12, 13, 14])
    return [
        SequenceState(str(i), Request(str(i), tuple(text), own), 0, i, list(text), stop, 64, slot=slot)
        for i, (text, own, slot) in enumerate(zip(texts, params, (0, 1, 3), strict=True))
    ]


def counted(model: DraftModel) -> list[int]:
    """Return a list that gets an entry for each call."""
    calls, run = list[int](), model.in_one_call.draft
    model.in_one_call.draft = lambda *own: calls.append(1) or run(*own)  # type: ignore[method-assign, func-returns-value]
    return calls


def asked(texts: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[ProposalRequest]:
    return [ProposalRequest(text, (PlannedTree(DRAFT, shape),)) for text, shape in zip(texts, shapes, strict=True)]


@torch.inference_mode()
def grown(
    model: DraftModel, shapes: Sequence[TreeShape], params: Sequence[SamplingParams], stop: frozenset[int] = frozenset()
) -> list[TokenTree]:
    """Grow trees three times. Accepted are first children, then a last one, each with a token of the target's."""
    texts, found = sequences(params, stop), list[TokenTree]()
    for sequence in texts:
        model.enter_slot(sequence, None)
    for turn in range(3):
        model.sampler.read.clear()  # type: ignore[attr-defined]
        trees = model.propose(asked(texts, shapes))
        for sequence, tree in zip(texts, trees, strict=True):
            path = tree.first_path[:-1] if turn == 0 else tree.children[-1][-1:]
            sequence.tokens += [*(tree.tokens[node] for node in path), 20 + turn]
            model.committed(sequence, tree, path)
        found += trees
    return found


GROWS = 4  # a difference of float32's rounding, with each token that is read behind others that a draft has read


def ancestors(tree: TokenTree, node: int) -> list[int]:
    """Return a node and all above it, none for the text."""
    return [] if node < 0 else [node, *ancestors(tree, tree.parents[node])]


# A nucleus may hold fewer tokens than siblings are asked for. The two ways number what follows differently then.
@pytest.mark.parametrize(
    ("policies", "shapes"), [pair for pair in product(POLICIES, SHAPES) if pair[0] != "nucleus" or pair[1] == "chains"]
)
@pytest.mark.parametrize("kind", [*KINDS, "block of one mask"])
def test_trees_are_those_of_levels(kind: str, policies: str, shapes: str) -> None:
    params = POLICIES[policies]
    target, draft = draft_of(kind, torch.float32)
    vocab, calls = target.identity.vocab_size, list[list[TokenTree]]()
    passes = []
    for once in (False, True):
        model = model_of(draft, vocab, in_one_call=once)
        made = counted(model)
        calls.append(grown(model, SHAPES[shapes], params))
        assert len(made) == (3 if once else 0)
        passes.append(model.runner.passes)
    for wanted, found in zip(*calls, strict=True):
        assert (found.tokens, found.parents) == (wanted.tokens, wanted.parents)
        for ours, theirs in zip(found.groups, wanted.groups, strict=True):
            assert (ours.parent, ours.nodes, ours.source) == (theirs.parent, theirs.nodes, theirs.source)
            assert (ours.drawn_from is None) == (theirs.drawn_from is None)
            if ours.drawn_from is not None and theirs.drawn_from is not None:
                own, grows = ours.drawn_from.probs[ours.row], GROWS ** len(ancestors(found, ours.parent))
                torch.testing.assert_close(
                    own, theirs.drawn_from.probs[theirs.row], atol=2e-6 * grows, rtol=2e-4 * grows
                )
                torch.testing.assert_close(own.sum(), torch.tensor(1.0))
    assert passes[0] == passes[1]
    assert all(len(tree) == shape.nodes for tree, shape in zip(calls[1], SHAPES[shapes] * 3, strict=True))


@pytest.mark.parametrize(("width", "taken"), [(40, True), (63, True), (64, False), (70, False)])
def test_many_readers_of_one_level(width: int, taken: bool) -> None:
    """More than attention takes at once, and than a word has bits."""
    target, draft = draft_of("eagle", torch.float32)
    vocab, shapes = target.identity.vocab_size, (TreeShape(((width,), (1,) * width)), *[TreeShape.full((1,))] * 2)
    model = model_of(draft, vocab, in_one_call=True)
    calls = counted(model)
    assert model.in_one_call.runner.prepared is not None
    assert model.in_one_call.runner.prepared.native is not None
    model.in_one_call.runner.prepared.native.most = 80
    found = grown(model, shapes, POLICIES["drawn"])
    assert len(calls) == (3 if taken else 0)
    wanted = grown(model_of(draft, vocab, in_one_call=False), shapes, POLICIES["drawn"])
    assert [(tree.tokens, tree.parents) for tree in found] == [(tree.tokens, tree.parents) for tree in wanted]


@pytest.mark.parametrize("kind", ["tokens", "eagle"])
def test_distributions_where_siblings_end_early(kind: str) -> None:
    """Both ways draw other tokens then. What they draw behind the same path they draw from the same distribution."""
    target, draft = draft_of(kind, torch.float32)
    vocab, params = target.identity.vocab_size, POLICIES["nucleus"]
    found = []
    for once in (False, True):
        groups = {}
        for row, tree in enumerate(grown(model_of(draft, vocab, in_one_call=once), SHAPES["trees"], params)[:3]):
            for group in tree.groups:
                assert group.drawn_from is not None
                probs, path = group.drawn_from.probs[group.row], [tree.tokens[node] for node in tree.path(group.parent)]
                kept = group.drawn_from.kept_ids
                drawn = [tree.tokens[node] for node in group.nodes]
                columns = drawn if kept is None else torch.searchsorted(kept, torch.tensor(drawn)).tolist()
                assert len(set(drawn)) == len(drawn) == min(2, int((probs > 0).sum()))
                assert bool((probs[columns] > 0).all())
                groups[row, tuple(path)] = probs
        found.append(groups)
    both = found[0].keys() & found[1].keys()
    assert len(both) > 3
    assert any(len(tree) < 14 for tree in grown(model_of(draft, vocab, in_one_call=True), SHAPES["trees"], params))
    for place in both:
        torch.testing.assert_close(found[1][place], found[0][place], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["tokens", "eagle", "hydra", "block"])
def test_nothing_is_drafted_behind_a_stop_token(kind: str) -> None:
    target, draft = draft_of(kind, torch.float32)
    vocab, stop = target.identity.vocab_size, frozenset(range(0, 300, 2))
    wanted, found = (
        grown(model_of(draft, vocab, in_one_call=once), SHAPES["trees"], [GREEDY] * 3, stop) for once in (False, True)
    )
    assert [(tree.tokens, tree.parents) for tree in found] == [(tree.tokens, tree.parents) for tree in wanted]
    assert any(len(tree) < 14 for tree in found), "some tokens end an answer"
    for tree in found:
        assert not any(tree.children.get(node) for node, token in enumerate(tree.tokens) if token in stop)


def test_siblings_end_where_no_probability_is_left() -> None:
    """At almost no temperature the best token has all of it."""
    target, draft = draft_of("tokens", torch.float32)
    model = model_of(draft, target.identity.vocab_size, in_one_call=True)
    cold = [SamplingParams(temperature=1e-4)] * 3
    assert all(len(tree) == 3 for tree in grown(model, SHAPES["siblings"], cold))


@pytest.mark.parametrize(
    ("params", "topk", "taken"),
    [
        (PLAIN, False, True),
        (SamplingParams(top_p=0.9, seed=1), False, True),
        (SamplingParams(top_p=0.9, seed=1), True, True),
        (SamplingParams(presence_penalty=1.0), False, False),
        (SamplingParams(temperature=0.0, min_tokens=16), False, False),
    ],
)
def test_what_is_left_to_other_ways(params: SamplingParams, topk: bool, taken: bool) -> None:
    """Others of the step are drafted in one call all the same."""
    target, draft = draft_of("tokens", torch.float32)
    model = model_of(draft, target.identity.vocab_size, in_one_call=True, topk=topk)
    rows, run = list[int](), model.in_one_call.draft
    model.in_one_call.draft = lambda own, *others: rows.append(len(own)) or run(own, *others)  # type: ignore[method-assign, func-returns-value]
    found = grown(model, SHAPES["siblings"], [PLAIN, params, GREEDY])
    assert rows == [3 if taken else 2] * 3
    assert all(len(tree) == 6 for tree in found)


@pytest.mark.parametrize(("least_acceptance", "taken"), [(0.0, True), (1e-9, False)])
def test_levels_that_may_be_left_out_are_left_to_other_ways(least_acceptance: float, taken: bool) -> None:
    target = llama(torch.float32)
    draft = state_draft("confident block", target)
    model = model_of(draft, target.identity.vocab_size, in_one_call=True)
    model.levels.least_acceptance = least_acceptance
    calls = counted(model)
    grown(model, SHAPES["siblings"], [GREEDY] * 3)
    assert len(calls) == (3 if taken else 0)


@pytest.mark.parametrize("kind", ["tokens", "truncated hydra", "truncated block"])
def test_a_row_of_nan_keeps_the_levels_before_and_others_go_on(kind: str) -> None:
    target, draft = draft_of.__wrapped__(kind, torch.float32)
    model = model_of(draft, target.identity.vocab_size, in_one_call=True)
    whole = grown(model, SHAPES["trees"], [GREEDY] * 3)[:3]
    behind = whole[1].tokens[0]  # row 1 reads it at its second level
    with torch.no_grad():
        draft.model.get_input_embeddings().weight[behind] = torch.nan
    again = model_of(draft, target.identity.vocab_size, in_one_call=True)
    texts = sequences([GREEDY] * 3, frozenset())
    for sequence in texts:
        again.enter_slot(sequence, None)
    with torch.inference_mode():
        trees = again.propose(asked(texts, SHAPES["trees"]))
    failed = [bool(text.failed_sources) for text in texts]
    assert failed[1]
    assert not all(failed)
    assert trees[1].tokens == tuple(whole[1].tokens[node] for node in whole[1].children[-1])
    for row in range(3):
        assert failed[row] == (trees[row].depth < 3)
        assert failed[row] or trees[row].tokens == whole[row].tokens
