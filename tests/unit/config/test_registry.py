"""One line in a table is enough for a loss, a draft kind, a proposer or a controller to be chosen by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from distillspec.composition import compose
from distillspec.config import DraftConfig, EngineConfig, TrainConfig
from distillspec.config.registry import (
    CONTROLLERS,
    DRAFT_KINDS,
    LOSSES,
    PROPOSERS,
    Choice,
    LossChoice,
    ProposerChoice,
)
from distillspec.errors import ConfigError
from distillspec.losses import LOSSES as REFERENCES
from distillspec.losses.pairs import BucketedPair
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft import LayerSelection, make_pruned
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.control.by_name import ControllerParts
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.proposers.by_name import ProposerParts
from distillspec.serving.proposers.prompt_lookup import PromptLookup
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule, teacher_view
from distillspec.training.optimizer import choose_trainable
from distillspec.types import Sample

TABLES = {"losses": LOSSES, "draft kinds": DRAFT_KINDS, "proposers": PROPOSERS, "controllers": CONTROLLERS}


class SameToken(PromptLookup):
    """Proposes one token again and again."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token, self.proposed = token, 0

    def propose(self, requests: Sequence[ProposalRequest]) -> list[TokenTree]:
        self.proposed += sum(r.speculation_length for r in requests)
        return [TokenTree.chain([self.token] * r.speculation_length, source="lookup") for r in requests]

    def foreseen(self, sequence: SequenceState) -> None:  # type: ignore[override]
        """Tell nothing before it is asked."""


def squared(pair: BucketedPair, scale: float = 1.0) -> torch.Tensor:
    return scale * (pair.target_probs - pair.draft_probs).square().sum(-1)


def first_layer(config: DraftConfig, target: LanguageModel, layers: LayerSelection) -> LanguageModel:
    return make_pruned(DraftConfig(keep=[0]), target, layers)


def same_token(parts: ProposerParts, token: int = 5) -> SameToken:
    return SameToken(token)


def every_other(parts: ControllerParts, divisor: int = 1) -> FixedLength:
    return FixedLength(parts.speculation_length // divisor)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of code of somebody's own, and the line for each of its parts."""
    module: Any = ModuleType("toys")
    module.squared, module.first_layer = squared, first_layer
    module.same_token, module.every_other = same_token, every_other
    monkeypatch.setitem(sys.modules, "toys", module)
    monkeypatch.setitem(LOSSES, "toy", LossChoice("toys:squared", "squared differences"))
    monkeypatch.setitem(DRAFT_KINDS, "toy", Choice("toys:first_layer", "one layer"))
    monkeypatch.setitem(PROPOSERS, "toy", ProposerChoice("toys:same_token", "one token"))
    monkeypatch.setitem(CONTROLLERS, "toy", Choice("toys:every_other", "a fraction of the length"))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_line_names_code_that_exists(table: dict[str, Choice]) -> None:
    for name, choice in table.items():
        assert callable(choice.load()), name
        assert choice.about, name


@pytest.mark.usefixtures("toys")
def test_a_new_loss_trains(target: LanguageModel) -> None:
    config = compose("train", ["target=tiny", "loss=toy", "+loss.params.scale=2", "draft=toy"])
    draft = initialise_draft(config.draft, target)
    assert len(draft.layers) == 1
    choose_trainable(draft, train_embeddings=False)
    module = DistillModule(draft, config.loss)
    sample = Sample("p", "default", tuple(range(10, 20)), tuple(range(20, 40)))
    batch = SampleFeed([sample], TrainConfig(max_steps=1, batch_tokens=64, row_tokens=64), 0, seed=0).take()

    def step() -> torch.Tensor:
        weights = torch.ones(batch.response_tokens)
        return module(batch, teacher_view(module.mix, batch, target), weights, float(batch.response_tokens)).loss

    before = step()
    before.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.02 * parameter.grad
    assert 0 < step() < before

    draft_logits, target_logits = torch.randn(3, 7), torch.randn(3, 7)
    difference = target_logits.softmax(-1) - draft_logits.softmax(-1)
    found = REFERENCES["toy"](draft_logits, target_logits, scale=2)
    torch.testing.assert_close(found, 2 * difference.square().sum(-1))


@pytest.mark.usefixtures("toys")
def test_a_proposer_of_another_class_is_refused(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["toys"], "same_token", lambda parts: object())
    config = compose("bench", ["bench.prompts=[p]", "engine.proposer=toy", "engine.max_model_len=64"])
    with pytest.raises(ConfigError, match="proposer=toy is of the class object, which is no Proposer; derive it from"):
        Engine(target, settings=config.engine)


@pytest.mark.usefixtures("toys")
def test_a_new_proposer_and_a_new_controller_serve(target: LanguageModel) -> None:
    words = ["bench.prompts=[p]", "engine.proposer=toy", "engine.controller=toy", "engine.speculation_length=4"]
    options = ["+engine.proposer_options.token=9", "+engine.controller_options.divisor=2"]
    config = compose("bench", [*words, *options, "engine.max_slots=2", "engine.max_model_len=64"])
    engine = Engine(target, settings=config.engine)
    try:
        proposer = engine.proposer
        assert isinstance(proposer, SameToken)
        assert proposer.token == 9
        assert engine.controller.speculation_length == 2
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        (found,) = engine.generate([list(range(30, 40))], params)
    finally:
        engine.close()
    plain = Engine(target, settings=EngineConfig(max_slots=2, max_model_len=64))
    try:
        assert plain.generate([list(range(30, 40))], params)[0].completions[0].token_ids == (
            found.completions[0].token_ids
        )
    finally:
        plain.close()
    assert proposer.proposed > 0
    assert isinstance(named_controller("toy", 3, None), FixedLength)  # for comparisons, too


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        ("train", ["loss=nope"], r"loss=nope is not known; use one of ce, fkl, .*, toy"),
        ("train", ["loss.name=nope"], r"loss\.name=nope is not known; use one of fkl, rkl, .*, toy"),
        (
            "train",
            ["draft=nope"],
            r"draft=nope is not known; use one of block, eagle, .*, scratch, toy",
        ),
        ("serve", ["engine.proposer=nope"], r"proposer=nope is not known; use one of none, draft_model, .*, toy"),
        ("serve", ["engine.controller=nope"], r"controller=nope is not known; use one of fixed, .*, toy"),
    ],
)
@pytest.mark.usefixtures("toys")
def test_an_unknown_name_is_refused_with_those_there_are(command: str, words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        compose(command, words)


@pytest.mark.usefixtures("toys")
def test_an_option_that_a_choice_does_not_have_is_refused(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"proposer_options: toy has no option 'word'; it has: token"):
        Engine(target, settings=EngineConfig(proposer="toy", proposer_options={"word": 3}, max_model_len=64))
    with pytest.raises(ConfigError, match=r"controller_options: fixed has no option 'word'; it has: none"):
        Engine(target, settings=EngineConfig(controller="fixed", controller_options={"word": 3}, max_model_len=64))


def test_a_line_that_names_no_code_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot import nowhere:thing: No module named 'nowhere'"):
        Choice("nowhere:thing", "nothing").load()
