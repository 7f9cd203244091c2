"""Staged speculation: the draft's own tokens, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import DRAFT, LOOKUP, TokenTree
from distillspec.serving.proposers.base import ProposalRequest, Proposer
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.staged import Staged
from distillspec.serving.step.commit import Emission

from ..conftest import TIGHT, MakeEngine, plain_answers, prompts
from ..test_engine_grown_trees import MIXED, tree_draft
from ..test_engine_sampling import POLICIES, excess

FIXED: dict[str, Any] = {"controller": "fixed", "speculation_length": 4}


class Told(Proposer):
    """Guesses what it is told to."""

    def __init__(self, guess: Callable[[SequenceState], Sequence[int]]) -> None:
        self.guess = guess

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        return [TokenTree.chain(self.guess(r.sequence)[: r.speculation_length], source=LOOKUP) for r in requests]


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Windows = dict[tuple[int, ...], tuple[int, ...]]  # text before → drafted tokens


def drafted(engine: Engine) -> tuple[Windows, int]:
    """Answer greedily, and return what was drafted behind each text, and the passes of the draft. Close the engine."""
    found: Windows = {}

    def note(emissions: Sequence[Emission], logits: torch.Tensor) -> None:
        found.update({tuple(e.sequence.tokens[: -len(e.rows)]): e.tree.tokens for e in emissions if len(e.tree)})

    engine.observer = note
    engine.generate(prompts(3), GREEDY)
    draft = engine.proposer.draft if isinstance(engine.proposer, Staged) else engine.proposer
    passes = draft.runner.passes  # type: ignore[union-attr]
    engine.close()
    return found, passes


def staged_on(engine: Engine, guess: Callable[[SequenceState], Sequence[int]]) -> Engine:
    """Let the engine's draft be told guesses."""
    assert isinstance(engine.proposer, DraftModel)
    engine.use_proposer(Staged(engine.proposer, Told(guess), LOOKUP))
    return engine


@pytest.mark.parametrize("widths", [[], [2, 2]])
@pytest.mark.parametrize("helper", ["suffix", "recycling", "ngram", "prompt_lookup"])
def test_greedy_and_seeded_answers_do_not_change(
    random_model: Callable[..., LanguageModel], helper: str, widths: list[int]
) -> None:
    """In float64, with preemption and prompts read in chunks."""
    target = random_model("llama", torch.float64)
    asked = [prompt[:60] for prompt in prompts()]
    settings = EngineSettings(
        **TIGHT, **FIXED, max_cache_tokens=180, proposer="staged", proposer_options={"helper": helper}, widths=widths
    )
    engine = Engine(target, tree_draft("tokens", target), settings)
    expected = plain_answers(target, asked, MIXED)
    for _ in range(2):  # the second time earlier answers are known
        assert [output.token_ids for output in engine.generate(asked, MIXED)] == expected
    engine.close()


def test_right_guesses_save_passes_and_change_no_token(draft: LanguageModel, make_engine: MakeEngine) -> None:
    """Guessed by what the draft itself proposes for the same text."""
    alone, passes = drafted(make_engine(draft, **FIXED))
    told, fewer = drafted(staged_on(make_engine(draft, **FIXED), lambda own: alone.get(tuple(own.tokens), ())))
    assert told == alone
    assert fewer < 0.5 * passes, "one pass a window, in place of four"


@pytest.mark.parametrize("guess", [[3, 3, 3], [5], []])
def test_wrong_guesses_change_no_token(draft: LanguageModel, make_engine: MakeEngine, guess: list[int]) -> None:
    alone, _ = drafted(make_engine(draft, **FIXED))
    told, _ = drafted(staged_on(make_engine(draft, **FIXED), lambda own: guess))
    assert told == alone


def test_a_helper_that_raises_leaves_the_draft_as_it_is(draft: LanguageModel, make_engine: MakeEngine) -> None:
    alone, _ = drafted(make_engine(draft, **FIXED))
    told, _ = drafted(staged_on(make_engine(draft, **FIXED), lambda own: [1 // 0]))
    assert told == alone


def test_drawn_answers_follow_the_target(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(
        tree_draft("truncated", target),
        proposer="staged",
        proposer_options={"helper": "ngram"},
        controller="fixed",
        speculation_length=3,
        max_slots=64,
    )
    assert float(excess(engine, target, POLICIES["penalised"]).max()) < 5


def test_tokens_are_the_drafts(target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, proposer="staged", proposer_options={"helper": "prompt_lookup"}, **FIXED)
    sources: set[str] = set()
    engine.observer = lambda emissions, logits: sources.update(t.source for e in emissions for t in e.trials)
    engine.generate(prompts(), SamplingParams(temperature=1.0, max_tokens=12))
    assert sources == {DRAFT}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"helper": "draft_model"}, "helper=draft_model must be one of prompt_lookup, suffix, recycling, ngram"),
        ({"helper_options": {"worst": 1}}, "helper_options: suffix has no option 'worst'"),
    ],
)
def test_impossible_options_are_refused(
    draft: LanguageModel, make_engine: MakeEngine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(draft, proposer="staged", proposer_options=options)


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
def test_drafts_that_read_states_are_refused(target: LanguageModel, make_engine: MakeEngine, kind: str) -> None:
    with pytest.raises(ConfigError, match="proposer=staged needs a draft that reads tokens alone"):
        make_engine(tree_draft(kind, target), proposer="staged")
