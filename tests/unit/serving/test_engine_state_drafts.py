"""Drafts that read the target's states, served: what they draft is their own recursion, whatever happens to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft
from distillspec.models.features import read_states
from distillspec.models.unrolling import unrolled
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.draft_model import DraftModel

from ..models.state_drafts import drafted_logits, state_draft
from .conftest import hf_greedy, prompts
from .execution.test_graphs import FakeRecorder

NOISE = 0.02  # few tokens are accepted with more
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
KINDS_APART = ("eagle", "features", "medusa", "hydra", "block")  # the kinds without their variants
ROOM = {"max_slots": 3, "max_model_len": 128, "prefill_chunk": 16, "compile": False, "measure_costs_s": 0}


class Watched:
    """Notes what a draft proposes, and for which text."""

    def __init__(self, proposer: DraftModel) -> None:
        self.proposer, self.seen = proposer, list[tuple[list[int], list[int]]]()
        self.plain = proposer.propose

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        trees = self.plain(requests)
        self.seen += [(list(r.sequence.tokens), list(t.tokens)) for r, t in zip(requests, trees, strict=True)]
        return trees


def watched(engine: Engine) -> Watched:
    assert isinstance(engine.proposer, DraftModel)
    watch = Watched(engine.proposer)
    engine.proposer.propose = watch.propose  # type: ignore[method-assign]
    return watch


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("kind", "circumstance", "family"),
    [
        *product(("eagle", "features"), ("room", "preempted", "recorded", "confident"), ("llama",)),
        *product(("two layers of eagle", "normed eagle"), ("preempted",), ("llama",)),
        *product(("medusa", "hydra", "block"), ("preempted", "recorded", "confident"), ("llama",)),
        ("confident block", "recorded", "llama"),
        *product(("block both ways",), ("preempted", "recorded", "confident"), ("llama",)),
        *product(KINDS_APART, ("preempted",), ("gemma3_text", "qwen3", "mistral")),
    ],
)
def test_drafted_tokens_are_the_drafts_own_recursion(
    random_model: Callable[..., LanguageModel], kind: str, circumstance: str, family: str
) -> None:
    target = random_model(family, torch.float64)
    kept_ids = torch.arange(0, 250, 2)
    draft = state_draft(kind, target, kept_ids, noise=NOISE)
    settings = EngineSettings(
        **ROOM,
        controller="fixed",
        speculation_length=3,
        max_cache_tokens=150 if circumstance == "preempted" else None,
        draft_confidence=1e-6 if circumstance == "confident" else 0.0,  # drafts token by token
        feature_ids=[4, 1] if circumstance == "preempted" else [],  # kept for others
    )
    engine = Engine(target, draft, settings, recorder=FakeRecorder() if circumstance == "recorded" else None)
    watch = watched(engine)
    shared = [(7 * place) % 200 + 3 for place in range(64)]
    asked = [[*shared, 5 + number] for number in range(4)] + [prompt[:30] for prompt in prompts(3)]
    answers = engine.generate(asked, GREEDY)
    engine.close()
    for prompt, answer in zip(asked, answers, strict=True):
        assert list(answer.token_ids) == hf_greedy(target, prompt, 24)
    stats = [answer.stats for answer in answers]
    assert sum(s.accepted for s in stats) > 0
    assert (sum(s.preemptions for s in stats) > 0) == (circumstance == "preempted")
    assert sum(s.prefix_tokens for s in stats) > 0
    proposed = [each for each in watch.seen if each[1]]
    for text, tokens in proposed[:: max(1, len(proposed) // 12)]:
        logits = drafted_logits(draft, target, text, tokens)
        assert [int(kept_ids[each.argmax()]) for each in logits] == tokens


TOKENS = "tokens alone"
SWAPS = {0: TOKENS, **{5 + 5 * turn: kind for turn, kind in enumerate(KINDS_APART)}, 30: TOKENS}  # by step


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=4, ignore_eos=True)])
def test_swaps_between_kinds_change_no_token_and_rows_draft_again(
    random_model: Callable[..., LanguageModel], params: SamplingParams, tmp_path: Path
) -> None:
    target, params = random_model("llama", torch.float64), replace(params, max_tokens=64)
    save_draft(initialise_draft(DraftConfig(layers=2), target), tmp_path / TOKENS, target)
    for kind in KINDS_APART:
        save_draft(state_draft(kind, target), tmp_path / kind, target)
    settings = EngineSettings(**ROOM, controller="fixed", speculation_length=2)
    asked = prompts(3)
    plain = Engine(target, None, settings)
    expected = [list(answer.token_ids) for answer in plain.generate(asked, params)]
    plain.close()
    engine = Engine(target, load_draft(tmp_path / TOKENS, target, dtype=target.dtype), settings)
    for number, prompt in enumerate(asked):
        engine.submit(Request(str(number), tuple(prompt), params))
    found: dict[str, list[int]] = {}
    drafted_after: dict[int, int] = {}  # steps from a swap to the first drafted token, by the swap's step
    for step in range(400):
        if step in SWAPS:
            engine.load_draft(tmp_path / SWAPS[step])
            watch, loaded = None, step
        output = engine.step()
        engine.check_integrity()
        found |= {answer.request_id: list(answer.token_ids) for answer in output.finished}
        if watch is None:  # the draft may be swapped by the step
            watch = watched(engine)
        elif any(tokens for _, tokens in watch.seen):
            drafted_after.setdefault(loaded, step - loaded)
        if not engine.has_work:
            break
    engine.close()
    assert [found[str(number)] for number in range(len(asked))] == expected
    assert drafted_after.keys() == SWAPS.keys(), "each kind drafts before the next one comes"
    assert max(drafted_after.values()) <= 8


@pytest.mark.parametrize("recorded", [False, True])
def test_what_a_confidence_head_expects_to_be_rejected_is_not_verified(
    random_model: Callable[..., LanguageModel], recorded: bool
) -> None:
    target = random_model("llama", torch.float64)
    draft = state_draft("confident block", target, noise=NOISE)
    with torch.no_grad():
        draft.state_input.confidence.weight.mul_(20)  # type: ignore[union-attr, union-attr]
    settings = EngineSettings(**ROOM, controller="fixed", speculation_length=3, draft_confidence=0.5)
    engine = Engine(target, draft, settings, recorder=FakeRecorder() if recorded else None)
    watch = watched(engine)
    prompt = prompts(3)[-1]
    (answer,) = engine.generate([prompt], replace(GREEDY, max_tokens=48))
    engine.close()
    assert list(answer.token_ids) == hf_greedy(target, prompt, 48)
    assert len({len(tokens) for _, tokens in watch.seen}) > 2
    for text, tokens in watch.seen[:-4]:  # the last ones may draft fewer
        assert len(tokens) == _likely(draft, target, text, 3)


@torch.no_grad()
def _likely(draft: LanguageModel, target: LanguageModel, text: list[int], count: int) -> int:
    """Return the number of drafted tokens before the first one that is predicted to be rejected."""
    ids = torch.tensor([[*text, *[0] * count]])
    places = torch.arange(ids.shape[1])[None]
    newest = [torch.tensor([len(text) - 1 + position]) for position in range(count)]
    states = read_states(target, ids, places, draft.state_ids)
    own = torch.cat(unrolled(draft, ids, places, states, newest))
    likely = torch.sigmoid(draft.state_input.confidence_logits(own)) > 0.5  # type: ignore[union-attr, operator]
    return int(likely.long().cumprod(0).sum())


def test_no_more_tokens_are_drafted_than_there_are_heads(random_model: Callable[..., LanguageModel]) -> None:
    target = random_model("llama", torch.float64)
    draft = initialise_draft(DraftConfig(kind="medusa", positions=2, sequential=True), target)
    engine = Engine(target, draft, EngineSettings(**ROOM, controller="fixed", speculation_length=6))
    watch = watched(engine)
    asked = prompts(2)
    answers = engine.generate(asked, GREEDY)
    assert max(len(tokens) for _, tokens in watch.seen) == 2
    assert engine.proposer.caches[0].layers == {}, "heads keep nothing of a text"
    engine.close()
    assert [list(answer.token_ids) for answer in answers] == [hf_greedy(target, prompt, 24) for prompt in asked]


def test_a_token_draft_keeps_no_states(random_model: Callable[..., LanguageModel]) -> None:
    target = random_model("llama")
    engine = Engine(target, initialise_draft(DraftConfig(layers=2), target), EngineSettings(**ROOM))
    engine.generate(prompts(2), GREEDY)
    assert engine.runner.cache.features is None
    engine.close()
