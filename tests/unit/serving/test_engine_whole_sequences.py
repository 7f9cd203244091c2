"""Whole sequences follow the target, whatever happens to a request in mid-answer.

One or two policies take turns in one queue, over a target of three ids. All 81 sequences of four tokens are counted,
and held to the target's own law by χ². Each circumstance and way of drafting has a mutant that these counts find out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.requests import RequestOutput, SequenceState
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import DraftProbs, SiblingGroup, TokenTree, merged
from distillspec.serving.decoding import windows
from distillspec.serving.decoding.logits import Place
from distillspec.serving.decoding.noise import noise_key
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.tree_rules import RejectionRule
from distillspec.serving.execution import slot_pool
from distillspec.serving.proposers import side_by_side
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.sequences.manager import SequenceManager

from .conftest import MakeEngine
from .whole_sequences import CAUGHT, LENGTH, LIKELY, counted, law, p_value

LETTERS = (0, 1, 2)
LOW, HIGH = (*[0] * 19, 1), (*[2] * 19, 1)  # prompts. Prefixes of 16 tokens are reused
PROMPTS = {"drawn": LOW, "filtered": HIGH, "seeded": HIGH, "penalised": LOW}
DEAD_END = [[1, 1, letter] for letter in LETTERS]  # behind two ones nothing may be written: the request fails there
POLICIES = {
    "drawn": SamplingParams(temperature=2.0),
    "filtered": SamplingParams(temperature=1.5, top_p=0.85),
    "seeded": SamplingParams(temperature=2.0, seed=0),
    "penalised": SamplingParams(temperature=1.5, frequency_penalty=0.7, stop_token_ids=[2], bad_word_ids=DEAD_END),
}
REQUESTS = 480  # of all policies. Where a mutant does much harm, fewer show it
FEWER = {"reused": 240, "ngram": 320}
ABORTED = 4  # one of so many is aborted
ARRIVING = 16  # requests a step, where each preempts an earlier one
SHARP = 4.0  # factor of the layers' weights, so that what follows depends on all the text
SEEN = 30  # requests that an event must happen to, and drafted tokens that must be accepted
AGAIN = 1_000_000  # added to the seed of a request that goes on


class RandomShapes(LengthController):
    """Another random tree for each row and step, or none, from each of its sources."""

    speculation_length, most_nodes = 3, 10

    def __init__(self) -> None:
        self._random = Random(5)

    def plan(self, view: BatchView) -> Plan:
        return Plan(tuple([RowPlan.joined(row, self._shape()) for row in view.rows]))

    def _shape(self) -> TreeShape:
        parents = [self._random.randrange(-1, node) for node in range(self._random.randrange(6))]
        return TreeShape.of_parents(parents).shortened(3)


WAYS: dict[str, dict[str, Any]] = {
    "chain": {"tree": "off", "speculation_length": 2},
    "sampled": {"tree": "sampled", "widths": [2, 2], "speculation_length": 2},
    "topk": {"tree": "topk", "widths": [2, 2], "speculation_length": 2},
    "dynamic": {"tree": "dynamic", "widths": [2, 2], "nodes": 4, "speculation_length": 2},
    "fork": {"tree": "fork", "widths": [2], "speculation_length": 2},
    "given": {"tree": "given", "widths": [1, 2], "speculation_length": 2},
    "medusa": {"tree": "medusa", "widths": [2, 2], "nodes": 4, "speculation_length": 2},
    "random": {"tree": "sampled", "speculation_length": 3},
}
BOTH = ("swapped", "aborted")
EVENTS: dict[str, tuple[str, ...]] = {  # and whose requests they happen to
    "preempted": ("drawn", "seeded"),
    "swapped": ("drawn", "filtered"),
    "aborted": ("drawn", "filtered"),
    "reused": ("drawn", "seeded"),
    "ngram": ("drawn", "penalised"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "preempted": {"max_slots": 32, "max_cache_tokens": 32 * 22},
    "ngram": {"proposer": ["ngram", "draft_model"]},
}


class Case(NamedTuple):
    way: str
    events: tuple[str, ...]
    kernel: bool = True  # False: verdicts by torch, as on other devices
    paged: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        chosen = {"max_slots": 64, "max_model_len": 64, "compile": False, "proposer": "draft_model", **WAYS[self.way]}
        for event in self.events:
            chosen |= SETTINGS.get(event, {})
        if self.way == "random":
            chosen["controller_object"] = RandomShapes()
        return chosen | ({"page_tokens": 4} if self.paged else {})

    @property
    def requests(self) -> int:
        return min([FEWER.get(event, REQUESTS) for event in self.events])

    @property
    def policies(self) -> tuple[str, ...]:
        if not self.kernel:
            return ("filtered",)  # more of one: mistakes of a verifier are seen in many answers
        return EVENTS[self.events[0]] if len(self.events) == 1 else ("drawn", "filtered")


CASES = [
    *(Case(way, (event,)) for way in ("chain", "random") for event in EVENTS),
    *(Case(way, ("swapped",), kernel=False) for way in ("chain", "sampled", "topk")),
    *(Case(way, BOTH) for way in ("sampled", "dynamic", "fork", "given", "medusa")),
    *(Case(way, ("swapped",), kernel=False) for way in ("dynamic", "medusa")),
    *(Case(way, (event,)) for way, event in (("given", "preempted"), ("dynamic", "preempted"), ("fork", "reused"))),
    *(Case(way, ("ngram",)) for way in ("sampled", "topk")),
    Case("random", ("preempted", "aborted", "reused"), paged=True),
]


@dataclass
class Play:
    """Requests in an engine, and what happens to them: by their numbers, never by what they write."""

    engine: Engine
    events: Sequence[str]
    drafts: Iterator[tuple[str, LanguageModel]]
    met: Counter[str] = field(default_factory=Counter)

    def run(self, asked: Sequence[Request]) -> dict[str, RequestOutput]:
        """Answer all, and return the answers of those that are not aborted."""
        waiting, found = list(asked), dict[str, RequestOutput]()
        arriving = ARRIVING if "preempted" in self.events else len(waiting)
        while waiting or self.engine.has_work:
            for request in waiting[:arriving]:
                self.engine.submit(request)
            del waiting[:arriving]
            self._disturb()
            found |= {output.request_id: output for output in self.engine.step().finished}
        kept = {name: output for name, output in found.items() if not self._is_aborted(name)}
        self._count(kept.values())
        return kept

    def _disturb(self) -> None:
        if "swapped" in self.events:
            version, draft = next(self.drafts)
            self.engine.use_draft(draft, version)
        for sequence in self.engine.sequences.decoding:
            if self._is_aborted(sequence.request.id) and sequence.output_length:
                self.met["aborted"] += 1
                self.engine.abort(sequence.request.id)

    def _is_aborted(self, name: str) -> bool:
        return "aborted" in self.events and Random(int(name)).randrange(ABORTED) == 0

    def _count(self, outputs: Any) -> None:
        for output in outputs:
            stats = output.stats
            self.met["preempted"] += stats.preemptions > 0 and stats.steps > 1
            self.met["swapped"] += len(stats.draft_versions) > 1
            self.met["reused"] += stats.prefix_tokens > len(LOW)
            self.met["ngram"] += "ngram" in stats.sources
            self.met["accepted"] += stats.accepted


@dataclass(frozen=True)
class Stage:
    """A target, two drafts that differ much, two of heads for Medusa's trees, and the laws of the policies."""

    target: LanguageModel
    drafts: dict[str, LanguageModel]
    heads: dict[str, LanguageModel]
    laws: dict[str, Tensor]

    def p_values(self, make_engine: MakeEngine, case: Case) -> dict[str, float]:
        """Return how likely what was written is, by policy."""
        if not case.kernel:
            size, device = self.target.identity.vocab_size, self.target.device
            parts = {"sampler_object": TokenSampler(size, device, kernel=False)}
        else:
            parts = {}
        drafts = self.heads if case.way == "medusa" else self.drafts
        engine = make_engine(drafts["one"], model=self.target, **case.settings, **parts)
        play = Play(engine, case.events, cycle([(name, drafts[name]) for name in ("other", "one")]))
        turns = dict(zip(range(case.requests), cycle(case.policies), strict=False))
        written = _in_parts(play, turns) if "reused" in case.events else _at_once(play, turns)
        assert {event: play.met[event] for event in (*case.events, "accepted") if play.met[event] < SEEN} == {}
        found = {name: [written[own] for own in written if turns[own] == name] for name in case.policies}
        return {name: p_value(counted(own, LETTERS), self.laws[name]) for name, own in found.items()}


def _asked(number: int, name: str, text: Sequence[int] = ()) -> Request:
    """Return a request that goes on behind `text`. Later ones are more urgent."""
    own = POLICIES[name]
    seed = None if own.seed is None else number + AGAIN * bool(text)
    params = replace(own, seed=seed, max_tokens=LENGTH, ignore_eos=True)
    return Request(str(number), (*PROMPTS[name], *text), params, priority=-number)


def _at_once(play: Play, turns: dict[int, str]) -> dict[int, tuple[int, ...]]:
    found = play.run([_asked(number, name) for number, name in turns.items()])
    return {int(name): output.token_ids for name, output in found.items()}


def _in_parts(play: Play, turns: dict[int, str]) -> dict[int, tuple[int, ...]]:
    """Return the first half of an answer, and that of another that goes on behind it, over text that slots hold."""
    half = LENGTH // 2
    first = play.run([_asked(number, name) for number, name in turns.items()])
    begun = {int(name): output.token_ids[:half] for name, output in first.items()}
    ended = play.run([_asked(number, turns[number], text) for number, text in begun.items()])
    return {int(name): (*begun[int(name)], *output.token_ids[:half]) for name, output in ended.items()}


@pytest.fixture(scope="module")
def stage() -> Stage:
    model = tiny_model(len(LETTERS), layers=2)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(SHARP if weight.ndim == 2 else 1.0)
    target = wrap(model, None, "three ids")
    drafts, heads = _unlike(target, DraftConfig(layers=1)), _unlike(target, DraftConfig(kind="medusa"))
    laws = {name: law(target, PROMPTS[name], LETTERS, own) for name, own in POLICIES.items()}
    return Stage(target, drafts, heads, laws)


def _unlike(target: LanguageModel, config: DraftConfig) -> dict[str, LanguageModel]:
    """Return two drafts that differ much."""
    drafts = {name: initialise_draft(config, target) for name in ("one", "other")}
    one, other = (draft.model.get_output_embeddings().weight for draft in drafts.values())
    with torch.no_grad():
        one.mul_(5.0)
        other.copy_(2.0 * other.roll(1, 0))
    return drafts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_sequences_follow_the_target(stage: Stage, make_engine: MakeEngine, case: Case) -> None:
    found = stage.p_values(make_engine, case)
    assert {name: p for name, p in found.items() if p < LIKELY} == {}


Spoil = Callable[[Sequence[ProposalRequest], list[TokenTree]], list[TokenTree]]


def _spoil(patch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Change what drafts propose."""
    plain = DraftModel.propose
    patch.setattr(DraftModel, "propose", lambda own, requests: spoil(requests, plain(own, requests)))


def _with_groups(tree: TokenTree, change: Callable[[SiblingGroup], SiblingGroup]) -> TokenTree:
    """Return the tree with other groups in place of those that were drawn."""
    return TokenTree(tree.tokens, tuple([change(own) if own.drawn_from else own for own in tree.groups]))


def keeps_the_old_drafts_q(patch: pytest.MonkeyPatch) -> None:
    """Distributions are remembered by text, and a swap does not clear them."""
    known: dict[Any, DraftProbs] = {}

    def remembered(request: ProposalRequest, tree: TokenTree, group: SiblingGroup) -> SiblingGroup:
        assert group.drawn_from is not None
        text = request.sequence.tokens, [tree.tokens[node] for node in tree.path(group.parent)]
        own = DraftProbs(group.drawn_from.probs[group.row][None].clone(), group.drawn_from.kept_ids)
        return group._replace(drawn_from=known.setdefault(repr((request.sequence.params.policy, text)), own), row=0)

    def spoil(requests: Sequence[ProposalRequest], trees: list[TokenTree]) -> list[TokenTree]:
        pairs = zip(requests, trees, strict=True)
        return [_with_groups(tree, partial(remembered, request, tree)) for request, tree in pairs]

    _spoil(patch, spoil)


def takes_another_rows_q(patch: pytest.MonkeyPatch) -> None:
    """Behind an abort all rows of a table move by one."""
    aborted: list[str] = []
    plain = Engine.abort

    def abort(engine: Engine, name: str) -> None:
        aborted.append(name)
        plain(engine, name)

    def spoil(requests: Sequence[ProposalRequest], trees: list[TokenTree]) -> list[TokenTree]:
        if not aborted:
            return trees
        aborted.clear()
        tables = [{own.parent: own for own in tree.groups if own.drawn_from} for tree in [*trees[1:], *trees[:1]]]

        def next_rows(table: dict[int, SiblingGroup], own: SiblingGroup) -> SiblingGroup:
            other = table.get(own.parent, own)
            return own._replace(drawn_from=other.drawn_from, row=other.row)

        pairs = zip(trees, tables, strict=True)
        return [_with_groups(tree, partial(next_rows, table)) for tree, table in pairs]

    patch.setattr(Engine, "abort", abort)
    _spoil(patch, spoil)


def counts_noise_from_the_preemption(patch: pytest.MonkeyPatch) -> None:
    began: dict[str, int] = {}
    plain = SequenceManager.preempt

    def preempt(manager: SequenceManager, sequence: SequenceState) -> None:
        began[sequence.id] = sequence.output_length
        plain(manager, sequence)

    def key(place: Place) -> tuple[int, int]:
        own = place.sequence
        written = own.output_length + len(place.drafted) - began.get(own.id, 0)
        return (0, 0) if own.params.seed is None else noise_key(own.params.seed, own.index, written)

    patch.setattr(SequenceManager, "preempt", preempt)
    patch.setattr(windows, "place_key", key)


def reuses_text_without_reading_it(patch: pytest.MonkeyPatch) -> None:
    """What a slot holds is taken for the beginning of any text."""
    patch.setattr(slot_pool, "common_length", lambda held, tokens: min(len(held), len(tokens)))
    patch.setattr(slot_pool, "PROBE", 0)


def judges_ngrams_by_the_drafts_q(patch: pytest.MonkeyPatch) -> None:
    def spoilt(trees: Sequence[TokenTree]) -> TokenTree:
        tree = merged(trees)
        drawn = {own.parent: own for own in tree.groups if own.drawn_from}
        like = [drawn.get(own.parent, own) for own in tree.groups]
        pairs = zip(tree.groups, like, strict=True)
        groups = [own._replace(drawn_from=other.drawn_from, row=other.row) for own, other in pairs]
        return TokenTree(tree.tokens, tuple(groups))

    patch.setattr(side_by_side, "merged", spoilt)


def forgets_to_renormalise_the_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RejectionRule, "normalised", staticmethod(lambda p: p))


def leaves_rejected_children_in_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RejectionRule, "residual", lambda own, p, child, rejected, rank: p)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Case]] = [
    (keeps_the_old_drafts_q, Case("chain", ("swapped",))),
    (keeps_the_old_drafts_q, Case("random", ("swapped",))),
    (takes_another_rows_q, Case("chain", ("aborted",))),
    (takes_another_rows_q, Case("random", ("aborted",))),
    (counts_noise_from_the_preemption, Case("chain", ("preempted",))),
    (reuses_text_without_reading_it, Case("random", ("preempted",))),
    (reuses_text_without_reading_it, Case("chain", ("reused",))),
    (judges_ngrams_by_the_drafts_q, Case("chain", ("ngram",))),
    (judges_ngrams_by_the_drafts_q, Case("random", ("ngram",))),
    *((keeps_the_old_drafts_q, Case(way, BOTH)) for way in ("fork", "given")),
    (forgets_to_renormalise_the_residual, Case("sampled", ("swapped",), kernel=False)),
    *((leaves_rejected_children_in_p, Case(way, ("swapped",), kernel=False)) for way in ("topk", "dynamic", "medusa")),
]


@pytest.mark.parametrize(("spoil", "case"), MUTANTS, ids=lambda own: getattr(own, "__name__", str(own)))
def test_the_same_counts_find_a_mutant_out(
    stage: Stage,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    case: Case,
) -> None:
    assert case in CASES
    spoil(monkeypatch)
    assert min(stage.p_values(make_engine, case).values()) < CAUGHT
