"""Engines over the tiny target, and their oracle: transformers' own generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.models.vocabulary import choose_kept_ids
from distillspec.serving import Engine, EngineSettings, SamplingParams

from .browser import browser, page  # noqa: F401 (fixtures)

MakeEngine = Callable[..., Engine]
PROMPT_LENGTHS = (3, 17, 1, 8, 70, 5, 29, 2)


def prompts(count: int = len(PROMPT_LENGTHS), seed: int = 3) -> list[list[int]]:
    """Return prompts of random bytes and many lengths. Some repeat themselves, so that lookups find something."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = torch.randint(3, 250, (PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)],), generator=generator).tolist()
        made.append(ids * 3 if i % 2 else ids)
    return made


# Slots and chunks for which rows are preempted and prompts are read in parts. Engines that time no passes start sooner.
TIGHT: dict[str, Any] = {"max_slots": 3, "max_model_len": 128, "prefill_chunk": 16, "compile": False}
TIGHT["measure_costs_s"] = 0.0
# Kernels under Triton's interpreter take seconds a pass: nothing is timed, and nothing is compiled beside them.
INTERPRETED: dict[str, Any] = {"attention": "triton", "compile": False, "measure_costs_s": 0.0}


@pytest.fixture
def no_kernel_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kernels untried, where the engine's text tells whether they are right.

    Under Triton's interpreter the trial takes as long as the engine's passes.
    """
    monkeypatch.setattr("distillspec.serving.execution.attention.kernel_failure", lambda *_: None)


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Give torch two threads: work beside its own, such as the drafting of micro-batches, has one of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# What a model wrote, by what it was asked. Hundreds of tests ask the same few questions.
_answers: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()


def _known(model: LanguageModel) -> dict[Any, Any]:
    """Return what was written with the weights that the model has now."""
    weights = tuple((value.dtype, float(value.detach().sum(dtype=torch.float64))) for value in model.model.parameters())
    return _answers.setdefault(model.model, {}).setdefault(weights, {})


def plain_answers(target: LanguageModel, asked: list[list[int]], params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Return the answers of an engine without a draft. Those that are drawn without a seed are drawn once."""
    known, key = _known(target), repr((asked, params))
    if key not in known:
        engine = Engine(target, None, EngineSettings(**TIGHT))
        known[key] = [output.token_ids for output in engine.generate(asked, params)]
        engine.close()
    return list(known[key])


def ticks() -> Callable[[], float]:
    """Return a clock that goes on by a second whenever it is read.

    A controller that learns costs by it plans by the tokens alone. By the time of a busy machine it may rightly draft
    nothing.
    """
    return itertools.count(1.0).__next__


def hf_greedy(model: LanguageModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return transformers' own greedy continuation without the prompt. Ids that only pad the head are suppressed."""
    known, key = _known(model), (*prompt, max_new_tokens)
    if key not in known:
        known[key] = _generated(model, prompt, max_new_tokens)
    return list(known[key])


def _generated(model: LanguageModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(model.stop_ids),
        suppress_tokens=list(range(model.identity.vocab_size, model.model.config.vocab_size)),
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def shallow_target(target: LanguageModel) -> LanguageModel:
    """Two layers, for kernels under Triton's interpreter: each layer of a pass takes it a second."""
    return wrap(tiny_model(target.model.config.vocab_size, layers=2), target.tokenizer, "tiny")


@pytest.fixture
def shallow_draft(shallow_target: LanguageModel) -> LanguageModel:
    """One of the two layers."""
    return initialise_draft(DraftConfig(layers=1), shallow_target)


@pytest.fixture
def draft(target: LanguageModel) -> LanguageModel:
    """Half the target's layers."""
    return initialise_draft(DraftConfig(layers=2), target)


@pytest.fixture
def truncated_draft(target: LanguageModel) -> LanguageModel:
    """Half the layers and 60 of the ids."""
    counts = torch.zeros(target.identity.vocab_size).index_fill_(0, torch.arange(20, 260, 4), 1)
    return initialise_draft(DraftConfig(layers=2), target, kept_ids=choose_kept_ids(counts, 60, target.tokenizer))


@pytest.fixture(scope="module")
def continuation(target: LanguageModel) -> list[int]:
    """Greedy continuation of `prompts()[1]`, ends of text included."""
    prompt = prompts()[1]
    ids = torch.tensor([prompt])
    banned = list(range(target.identity.vocab_size, target.model.config.vocab_size))
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=None,
        suppress_tokens=banned,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture
def make_engine(target: LanguageModel) -> Iterator[MakeEngine]:
    """`make_engine(draft, max_slots=3, …)`. The models are given back at the end of the test. No passes are timed."""
    made: list[Engine] = []

    def make(draft: LanguageModel | None = None, *, model: LanguageModel | None = None, **settings: Any) -> Engine:
        defaults = {"max_slots": 4, "max_model_len": 256, "controller": "fixed", "measure_costs_s": 0.0}
        objects = ("controller_object", "proposer_object", "sampler_object")
        parts = {name: settings.pop(name) for name in objects if name in settings}
        engine = Engine(
            model or target,
            draft,
            EngineSettings(**{**defaults, **settings}),
            controller=parts.get("controller_object"),
            proposer=parts.get("proposer_object"),
            sampler=parts.get("sampler_object"),
        )
        made.append(engine)
        return engine

    yield make
    for engine in reversed(made):
        engine.close()
