"""Lossy verification: off by default, named where it is on, exact for greedy and seeded requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, Request, RequestRefused, SamplingParams
from distillspec.serving.base.tree import TARGET

from ..models.state_drafts import state_draft
from .conftest import TIGHT, MakeEngine, plain_answers, prompts
from .test_engine_grown_trees import tree_draft
from .test_engine_sampling import POLICIES, excess, penalised

LOSSY: dict[str, dict[str, Any]] = {
    "typical": {"verification": "typical", "speculation_length": 3},
    "target_initialised": {
        "verification": "target_initialised",
        "tree": "given",
        "widths": [3, 2, 1],
        "speculation_length": 3,
    },
}
MIXED = [  # greedy, seeded and drawn requests side by side
    SamplingParams(temperature=min(1.0, turn % 3), seed=turn if turn % 3 == 1 else None, max_tokens=20, ignore_eos=True)
    for turn in range(8)
]


@pytest.mark.parametrize("kind", ["tokens", "eagle", "block"])
@pytest.mark.parametrize("mode", LOSSY)
def test_greedy_and_seeded_answers_stay_exact(random_model: Callable[..., LanguageModel], mode: str, kind: str) -> None:
    """Beside drawn ones, with preemption and prompts read in chunks, in float64."""
    target = random_model("llama", torch.float64)
    asked = [prompt[:60] for prompt in prompts()]
    expected = plain_answers(target, asked, MIXED)
    settings = EngineSettings(**TIGHT, max_cache_tokens=150, controller="fixed", **LOSSY[mode])
    engine = Engine(target, tree_draft(kind, target), settings)
    found = engine.generate(asked, MIXED)
    engine.close()
    for params, output, wanted in zip(MIXED, found, expected, strict=True):
        assert len(output.token_ids) == params.max_tokens
        if not params.draws:
            assert output.token_ids == wanted
    drawn = [output.stats for params, output in zip(MIXED, found, strict=True) if params.draws]
    assert sum(stats.steps for stats in drawn) > 0


def test_typical_answers_are_not_the_targets(target: LanguageModel, make_engine: MakeEngine) -> None:
    """The test of exactness sees it, so the mode is in use, and the test can fail."""
    draft = state_draft("eagle", target, noise=0.3)
    engine = make_engine(draft, max_slots=64, tree="topk", **LOSSY["typical"])
    assert float(excess(engine, target, SamplingParams(temperature=2.0), requests=600).max()) > 20


@pytest.mark.parametrize(("kind", "widths"), [("tokens", [1, 1]), ("eagle", [3])])
def test_one_candidate_or_none_to_choose_by_is_exact(
    target: LanguageModel, make_engine: MakeEngine, kind: str, widths: list[int]
) -> None:
    """One candidate, or candidates with no drafted token behind them: the first, which is an exact draw, is taken."""
    draft = state_draft(kind, target, noise=0.3) if kind == "eagle" else tree_draft(kind, target)
    settings = {"verification": "target_initialised", "tree": "given", "widths": widths, "speculation_length": 2}
    engine = make_engine(draft, max_slots=64, **settings)
    seen: list[str] = []
    engine.observer = lambda emissions, logits: seen.extend(g.source for e in emissions for g in e.tree.groups)
    assert float(excess(engine, target, POLICIES["penalised"], requests=700).max()) < 5
    assert (TARGET in seen) == (len(widths) == 1)


def test_the_longest_path_is_taken_behind_candidates(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_slots=4, **LOSSY["target_initialised"])
    ranks: list[int] = []
    lengths: list[int] = []

    def note(emissions: Any, logits: Tensor) -> None:
        for emission in emissions:
            if emission.tree.roots:
                ranks.append(emission.tree.roots.index(emission.path[0]))
                lengths.append(len(emission.path))

    engine.observer = note
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
    outputs = engine.generate(prompts(), params)
    engine.close()
    assert {0, 1} <= set(ranks), "another candidate than the first was taken"
    assert max(lengths) > 1
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert len(output.token_ids) == 60
        text = torch.tensor([[*prompt, *output.token_ids]])
        logits = penalised(target.logits(text)[:, len(prompt) - 1 : -1].float(), text, params)
        wanted = torch.log_softmax(logits[0], -1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        found = torch.tensor([entry.logprob for entry in output.completions[0].logprobs or ()])
        torch.testing.assert_close(found, wanted.detach(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("mode", LOSSY)
def test_a_lossy_engine_says_so_and_refuses_who_needs_exactness(
    draft: LanguageModel, make_engine: MakeEngine, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = make_engine(draft, **LOSSY[mode])
    assert f"verification={mode} is lossy" in caplog.text
    with pytest.raises(RequestRefused, match=f"require_exact is refused: verification={mode} is lossy"):
        engine.submit(Request("a", (5, 6), SamplingParams(require_exact=True)))
    assert not engine.has_work


def test_an_exact_engine_answers_who_needs_exactness(draft: LanguageModel, make_engine: MakeEngine) -> None:
    (output,) = make_engine(draft).generate([[5, 6]], SamplingParams(require_exact=True, max_tokens=3, ignore_eos=True))
    assert len(output.token_ids) == 3


def test_levels_in_which_all_siblings_were_rejected_count(target: LanguageModel, make_engine: MakeEngine) -> None:
    """A target that gives candidates in place of a token has judged the nodes behind the accepted ones."""
    engine = make_engine(state_draft("eagle", target, noise=0.3), controller="fixed", **LOSSY["target_initialised"])
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    stats = [output.stats for output in engine.generate(prompts(4), params)]
    tried = sum(sum(one.acceptance.tried_at) for one in stats)
    accepted = sum(one.accepted for one in stats)
    assert tried > accepted > 0, "of the levels that were tried some were rejected"
