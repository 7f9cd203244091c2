"""Several proposers in one tree, and proposals from earlier logits, through the whole engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings

from .conftest import TIGHT, MakeEngine, plain_answers, prompts
from .test_engine_grown_trees import MIXED, tree_draft
from .test_engine_sampling import POLICIES, excess

ALL = ["prompt_lookup", "suffix", "recycling", "draft_model"]
OPTIONS = {"prompt_lookup": {"shortest": 1}}
SOURCES = [  # proposers, and whose tokens are accepted
    (ALL, {"lookup", "suffix", "recycled", "draft"}),
    (["ngram", "draft_model"], {"ngram", "draft"}),
    ("recycling", {"recycled"}),
    ("ngram", {"ngram"}),
]


@pytest.mark.parametrize("controller", ["fixed", "goodput"])
@pytest.mark.parametrize(("proposer", "sources"), SOURCES)
def test_greedy_and_seeded_answers_do_not_change(
    random_model: Callable[..., LanguageModel], proposer: Any, sources: set[str], controller: str
) -> None:
    """In float64, with preemption and prompts read in chunks."""
    target = random_model("llama", torch.float64)
    asked = [prompt[:60] for prompt in prompts()]
    expected = plain_answers(target, asked, MIXED)
    options = {"proposer_options": OPTIONS} if proposer == ALL else {}
    settings = EngineSettings(
        **TIGHT, **options, max_cache_tokens=180, controller=controller, proposer=proposer, widths=[2, 2], nodes=40
    )
    draft = tree_draft("eagle", target) if "draft_model" in proposer else None
    engine = Engine(target, draft, settings)
    tried: Counter[tuple[str, bool]] = Counter()
    joined: list[int] = []

    def note(emissions: Any, logits: torch.Tensor) -> None:
        tried.update((trial.source, trial.accepted) for emission in emissions for trial in emission.trials)
        joined.extend(len({group.source for group in emission.tree.groups}) for emission in emissions)

    engine.observer = note
    for _ in range(2):  # the second time earlier answers are known
        assert [output.token_ids for output in engine.generate(asked, MIXED)] == expected
    engine.close()
    if controller == "fixed":
        assert {source for source, accepted in tried if accepted} == sources
        assert max(joined) == len(sources)


def test_joined_trees_follow_the_target(target: LanguageModel, make_engine: MakeEngine) -> None:
    """Sources with and without distributions, duplicates among them."""
    engine = make_engine(
        tree_draft("truncated", target),
        proposer=["prompt_lookup", "recycling", "draft_model"],
        proposer_options=OPTIONS,
        widths=[2, 2],
        nodes=40,
        speculation_length=2,
        max_slots=64,
    )
    duplicates: list[int] = []

    def note(emissions: Any, logits: torch.Tensor) -> None:
        for emission in emissions:
            roots = [emission.tree.tokens[n] for n in emission.tree.children.get(-1, ())]
            duplicates.append(len(roots) - len(set(roots)))

    engine.observer = note
    assert float(excess(engine, target, POLICIES["penalised"]).max()) < 5
    assert max(duplicates) > 0


def test_without_a_draft_the_others_propose(target: LanguageModel, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="proposer=draft_model needs a draft"):
        make_engine(None, proposer=["suffix", "draft_model"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proposer": []}, r"proposer=\[\] names none"),
        ({"proposer": ["suffix", "suffix"]}, "names one twice"),
        ({"proposer": ["suffix_else_model", "recycling"]}, "suffix_else_model stands alone"),
        (
            {"proposer": ["suffix", "recycling"], "proposer_options": {"best": 3}},
            r"proposer_options.best is of none in \['suffix', 'recycling'\]",
        ),
    ],
)
def test_impossible_lists_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proposer": ["suffix", "recycling"], "proposer_options": {"suffix": 3}}, "proposer_options.suffix=3"),
        (
            {"proposer": ["suffix", "recycling"], "proposer_options": {"recycling": {"worst": 1}}},
            "proposer_options.recycling: recycling has no option 'worst'; it has: best",
        ),
    ],
)
def test_options_are_checked_by_name(make_engine: MakeEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(None, **settings)
