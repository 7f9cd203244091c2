"""Trees where much happens at once: answers that end inside branches, preemption, swapped drafts, shared prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.base.requests import RequestOutput
from distillspec.serving.control.by_name import ControllerParts, make_controller
from distillspec.serving.step.commit import Emission

from .conftest import TIGHT, MakeEngine, prompts, ticks
from .test_engine_grown_trees import FREE, tree_draft
from .whole_sequences import CAUGHT, LENGTH, LIKELY, counted, law, p_value

LETTERS = "abcdefgh"
STRINGS = ("ab", "ca", "dd", "be", "ef", "fa", "bc", "ed")
HEAD = [(7 * place) % 200 + 3 for place in range(24)]
ASKED = [[*HEAD, *prompt[:20]] for prompt in prompts(16)]
DRAFTS, HEADS = ("tokens", "eagle", "truncated"), ("medusa", "hydra")
CASES: list[tuple[str, str, list[int], tuple[str, ...]]] = [  # tree, controller, widths, drafts that take turns
    ("off", "fixed", [], DRAFTS),
    ("topk", "fixed", [3, 2], DRAFTS),
    ("sampled", "fixed", [2, 2], DRAFTS),
    ("dynamic", "fixed", [], DRAFTS),
    ("fork", "fixed", [3], DRAFTS),
    ("given", "fixed", [2, 2, 2], DRAFTS),
    ("medusa", "fixed", [], HEADS),
    ("topk", "goodput", [], DRAFTS),
    ("sampled", "goodput", [], DRAFTS),
]


def stopping(target: LanguageModel) -> list[SamplingParams]:
    """Return requests over few letters, greedy and seeded ones, that end by a stop token, a string, or the model's."""
    letters = target.text_tokenizer(LETTERS)["input_ids"]
    found = []
    for turn in range(len(ASKED)):
        ends: dict[str, Any] = {"stop": STRINGS} if turn % 2 else {"stop_token_ids": letters[-1:]}
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": turn} if turn % 4 else {"temperature": 0.0}
        found.append(SamplingParams(max_tokens=24, allowed_token_ids=[*letters, *target.stop_ids], **ends, **drawn))
    return found


def answers(engine: Engine, params: Sequence[SamplingParams], drafts: Sequence[LanguageModel]) -> list[RequestOutput]:
    """Answer all prompts, with another draft every few steps."""
    for number, (prompt, own) in enumerate(zip(ASKED, params, strict=True)):
        engine.submit(Request(str(number), tuple(prompt), own))
    found, steps, others = dict[str, RequestOutput](), 0, cycle([*drafts[1:], drafts[0]])
    while engine.has_work:
        steps += 1
        if steps % 5 == 0:
            engine.use_draft(next(others))
        found |= {output.request_id: output for output in engine.step().finished}
        engine.check_integrity()
    return [found[str(number)] for number in range(len(ASKED))]


def written(outputs: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    return [(o.token_ids, o.text, o.finish_reason, o.completions[0].stop_reason) for o in outputs]


@pytest.fixture(scope="module")
def expected(random_model: Callable[..., LanguageModel]) -> list[tuple[Any, ...]]:
    """Answers without a draft in float64, one at a time."""
    target = random_model("llama", torch.float64)
    engine = Engine(target, None, EngineSettings(**{**TIGHT, "max_slots": 1, "prefix_reuse": False}))
    found = written(engine.generate(ASKED, stopping(target)))
    engine.close()
    ends = Counter(type(stop_reason) for *_, stop_reason in found)
    assert min(ends[int], ends[str]) > 0, "some end by a token, some by a string"
    return found


@pytest.mark.parametrize(("tree", "controller", "widths", "kinds"), CASES)
def test_greedy_and_seeded_answers_end_where_they_would_without_a_draft(
    random_model: Callable[..., LanguageModel],
    expected: list[tuple[Any, ...]],
    tree: str,
    controller: str,
    widths: list[int],
    kinds: tuple[str, ...],
) -> None:
    target = random_model("llama", torch.float64)
    drafts = [tree_draft(kind, target) for kind in kinds]
    shape = {"tree": tree, "widths": widths, "nodes": 15, "speculation_length": 3}
    settings = EngineSettings(**TIGHT, **shape, proposer="draft_model", controller=controller, max_cache_tokens=135)
    engine = Engine(target, drafts[0], settings)
    engine.clock = ticks()
    if controller == "goodput":
        engine.use_controller(make_controller("goodput", ControllerParts(3, FREE, settings=settings), {}))
    ended: Counter[tuple[str, bool]] = Counter()

    def note(emissions: Sequence[Emission], logits: Tensor) -> None:
        for emission in emissions:
            inside = 0 < len(emission.rows) <= len(emission.path)
            if inside and emission.sequence.finish_reason == "stop":
                last = type(emission.sequence.stop_reason).__name__
                ended[last, emission.tree.is_chain] += 1

    engine.observer = note
    outputs = answers(engine, stopping(target), drafts)
    assert written(outputs) == expected
    assert sum(output.stats.prefix_tokens for output in outputs) > 0
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert max(len(output.stats.draft_versions) for output in outputs) > 1, "swapped in mid-request"
    engine.close()
    chain = tree == "off"
    assert ended["int", chain] > 0, "drafted stop tokens ended answers"
    assert chain or ended["str", chain] > 0, "and strings inside branches"


def test_whole_sequences_of_joined_dynamic_trees_follow_the_target(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    """A draft's dynamic trees behind those of n-grams, which learn from the answers: all 81 sequences are counted."""
    draft, prompt, requests = tree_draft("tokens", target), prompts()[1][:9], 1500
    letters = target.text_tokenizer("abc")["input_ids"]
    engine = make_engine(
        draft, proposer=["ngram", "draft_model"], tree="dynamic", speculation_length=3, nodes=8, max_slots=64
    )
    accepted: Counter[str] = Counter()
    engine.observer = lambda seen, logits: accepted.update(t.source for e in seen for t in e.trials if t.accepted)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=letters)
    outputs = engine.generate([prompt] * requests, params)
    engine.close()
    counts = counted([output.token_ids for output in outputs], letters)
    assert min(accepted["ngram"], accepted["draft"]) > 100
    assert p_value(counts, law(target, prompt, letters)) > LIKELY
    assert p_value(counts, law(draft, prompt, letters)) < CAUGHT, "the test would see the draft's own law"
