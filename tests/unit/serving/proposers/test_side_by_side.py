"""Several drafts in one engine: each proposes what it would propose alone, whoever drafts between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from distillspec.models import LanguageModel
from distillspec.models.slot_attention import slot_attention_in
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import PlannedTree, TreeShape, chain_of
from distillspec.serving.base.tree import LOOKUP, NGRAM, SUFFIX, TokenTree, merged
from distillspec.serving.proposers.base import EMPTY, ProposalRequest, Proposer
from distillspec.serving.proposers.draft_collapse import JUDGED_TOKENS
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.ngram import Ngram
from distillspec.serving.proposers.prompt_lookup import PromptLookup
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.proposers.suffix import SuffixLookup
from distillspec.serving.proposers.suffix_store import SuffixStore

from ..conftest import MakeEngine, hf_greedy, prompts

SLOTS, MAX_LEN = 3, 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Drafted = tuple[str, tuple[int, ...], tuple[int, ...]]  # source, text before, tokens


class Alternating:
    """Each step another source for each row: a, b, both, or none, at lengths 1 to 3."""

    speculation_length = 3

    def __init__(self) -> None:
        self.turn = 0

    def plan(self, view: BatchView) -> Plan:
        rows = []
        for place, row in enumerate(view.rows):
            turn = self.turn + place
            shape = TreeShape.full((1,) * min(1 + turn % 3, row.limit))
            sources = (("a",), ("b",), ("a", "b"), ())[turn % 4] if row.limit else ()
            rows.append(RowPlan(row.sequence_id, tuple([PlannedTree(source, shape) for source in sources])))
        return Plan(tuple(rows))

    def observe(self, result: StepResult) -> None:
        self.turn += 1

    def draft_changed(self, change: DraftChange) -> None: ...


@pytest.fixture
def new_draft(draft: LanguageModel, truncated_draft: LanguageModel) -> Iterator[Callable[[str, Engine], DraftModel]]:
    """`new_draft("a", engine)`, with caches of its own."""
    models = {"a": draft, "b": truncated_draft}
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(slot_attention_in(model.model))
        yield lambda name, engine: DraftModel(
            models[name], engine.sampler, engine.runner.cache, version=name, source=name
        )


def noted(source: str, proposer: DraftModel, found: list[Drafted]) -> DraftModel:
    """The same proposer, whose proposals are written down."""
    propose = proposer.propose

    def noting(requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        trees = propose(requests)
        texts = [tuple(request.sequence.tokens) for request in requests]
        found.extend((source, text, tree.tokens) for text, tree in zip(texts, trees, strict=True))
        return trees

    proposer.propose = noting  # type: ignore[method-assign]
    return proposer


def alone(proposer: DraftModel, text: tuple[int, ...], length: int) -> tuple[int, ...]:
    """What a draft proposes that reads the text from its start."""
    sequence = SequenceState("alone", Request("alone", text, GREEDY), 0, 0, list(text), frozenset(), 64, slot=0)
    proposer.enter_slot(sequence, None)
    (tree,) = proposer.propose([ProposalRequest(sequence, chain_of(length))])
    proposer.leave_slot(sequence)
    return tree.tokens


def test_drafts_that_alternate_and_swap_propose_as_each_alone(
    target: LanguageModel, make_engine: MakeEngine, new_draft: Callable[[str, Engine], DraftModel]
) -> None:
    wanted = {str(number): hf_greedy(target, prompt, 24) for number, prompt in enumerate(prompts(6)) if number != 1}
    engine = make_engine(max_slots=SLOTS, max_model_len=MAX_LEN, controller_object=Alternating(), prefix_reuse=True)
    found: list[Drafted] = []
    pair = SideBySide({name: noted(name, new_draft(name, engine), found) for name in ("a", "b")})
    engine.use_proposer(pair)
    for number, prompt in enumerate(prompts(6)):
        engine.submit(Request(str(number), tuple(prompt), GREEDY))
    done: dict[str, list[int]] = {}
    for step in range(200):
        if step == 9:
            engine.abort("1")
        if step == 12:
            engine.at_next_step(lambda: engine.sequences.preempt(engine.sequences.running[0]))
        if step == 15:
            engine.at_next_step(lambda: pair.put("b", noted("b", new_draft("b", engine), found)))
        done.update({output.request_id: list(output.token_ids) for output in engine.step().finished})
    assert not engine.has_work
    assert {name: tokens[: len(wanted[name])] for name, tokens in done.items() if name in wanted} == wanted
    drafted = [(source, text, tokens) for source, text, tokens in found if tokens]
    assert {source for source, *_ in drafted} == {"a", "b"}
    assert len(drafted) > 60
    fresh = {name: new_draft(name, engine) for name in ("a", "b")}
    for source, text, tokens in drafted:
        assert alone(fresh[source], text, len(tokens)) == tokens


def test_trees_of_several_sources_are_joined_in_the_plans_order(
    make_engine: MakeEngine, new_draft: Callable[[str, Engine], DraftModel]
) -> None:
    engine = make_engine()
    pair = SideBySide({LOOKUP: PromptLookup(2, 1), "a": new_draft("a", engine)})
    text = (5, 6, 7, 5, 6)
    sequence = SequenceState("s", Request("s", text, GREEDY), 0, 0, list(text), frozenset(), 64, slot=0)
    chain = TreeShape.full((1, 1))
    request = ProposalRequest(sequence, (PlannedTree("a", chain), PlannedTree(LOOKUP, chain)))
    (tree,) = pair.propose([request])
    assert [group.source for group in tree.groups_at(-1)] == ["a", LOOKUP]
    assert tree.tokens[-2:] == (7, 5)
    assert (tree.depth, len(tree)) == (2, 4)
    (looked_up,) = pair.propose([ProposalRequest(sequence, chain_of(3, LOOKUP))])
    assert looked_up.tokens == (7, 5, 6)
    (nobody,) = pair.propose([ProposalRequest(sequence, chain_of(3, "unknown"))])
    assert len(nobody) == 0
    assert pair.foreseen(sequence)[0].source == LOOKUP


class Silent(Proposer):
    """Proposes nothing."""

    def __init__(self, version: str) -> None:
        self.version = version

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [EMPTY] * len(requests)


@pytest.mark.parametrize("rests", [True, False])
def test_a_draft_is_judged_by_its_first_tokens_that_were_tried(rests: bool) -> None:
    """Those behind an accepted n-gram were not, and a draft that rests has none."""
    proposers = {name: Silent(version) for name, version in ((NGRAM, ""), ("a", "1"), ("b", "2"))}
    pair = SideBySide(proposers, {"a": 0.5, "b": 0.5}, rest_collapsed=rests)
    sequence = SequenceState("s", Request("s", (5, 6), GREEDY), 0, 0, [5, 6], frozenset(), 64, slot=0)
    behind = merged([TokenTree.chain((9,), source=NGRAM), TokenTree.chain((5, 6), source="a")])
    ngrams, own = (group.nodes[0] for group in behind.groups_at(-1))
    for _ in range(2 * JUDGED_TOKENS):
        pair.committed(sequence, behind, (ngrams,))
        pair.committed(sequence, TokenTree.chain((5,), source="b"), (0,))
    for _ in range(JUDGED_TOKENS):
        assert dict(pair.healthy) == {"a": True, "b": True}
        pair.committed(sequence, behind, ())
    assert dict(pair.healthy) == {"a": False, "b": True}
    for _ in range(JUDGED_TOKENS):
        pair.committed(sequence, behind, (own,))
    assert dict(pair.healthy) == {"a": not rests, "b": True}


def test_a_tenant_is_forgotten_by_all_though_the_files_of_one_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []

    def refused(suffix: SuffixLookup, tenant: str) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(SuffixLookup, "forget_tenant", refused)
    monkeypatch.setattr(Ngram, "forget_tenant", lambda ngram, tenant: forgotten.append(tenant))
    for order in ((SUFFIX, NGRAM), (NGRAM, SUFFIX)):
        own = {SUFFIX: SuffixLookup(SuffixStore(128, 300)), NGRAM: Ngram()}
        several = SideBySide({source: own[source] for source in order})
        with pytest.raises(OSError, match="read-only"):
            several.forget_tenant("a")
    assert forgotten == ["a", "a"]
