"""The engine accepts what the evaluator says, for every kind of draft: same texts, same places.

A dead draft changes no text. So each kind also has a floor of acceptance, on each of the ways in which an engine
computes on a CPU, and on those of CUDA that a CPU can take.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig, EngineConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.models.few_queries import why_not
from distillspec.models.paged_cache import PagedCache
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.proposers.draft_model import DraftModel

from ..unit.models.middle_llama import llama
from ..unit.models.state_drafts import KINDS, state_draft
from ..unit.serving.execution.test_graphs import FakeRecorder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = [[(7 * place + 11 * number) % 200 + 3 for place in range(5 + number)] for number in range(12)]


@pytest.fixture
def target() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float32"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("served_acceptance")


def draft_of(kind: str, model: LanguageModel, noise: float = 0.02) -> LanguageModel:
    if kind == "tokens":
        return initialise_draft(DraftConfig(layers=2), model)
    return state_draft(kind, model, noise=noise)


@pytest.mark.parametrize("kind", ["tokens", *KINDS])
def test_served_is_evaluated(target: LanguageModel, served: Any, kind: str) -> None:
    draft = draft_of(kind, target)
    settings = EngineConfig(
        verification="exact_by_token",  # tokens of a chain that is verified as a whole are not judged one by one
        controller="fixed",
        speculation_length=3,
        max_slots=4,
        max_model_len=128,
        compile=False,
    )
    engine = Engine(target, draft, settings)
    try:
        tried, samples = served.serve(engine, PROMPTS, SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True))
    finally:
        engine.close()
    assert all(len(sample.response_ids) == 60 for sample in samples)
    tried = served.expected(tried, samples, draft, target)
    for depth in (1, 2):
        found = served.compared(tried, depth)
        spread = (found["evaluated"] * (1 - found["evaluated"]) / found["trials"]) ** 0.5
        assert found["trials"] > 40
        assert abs(found["difference"]) < 4 * spread, f"depth {depth}: {found}"


# Medians of five engine seeds by "masks": the share of drafted tokens that is accepted. Floors are half of them.
MEDIANS = {"tokens": 0.96, "eagle": 0.68, "features": 0.98, "medusa": 0.86, "hydra": 0.85, "block": 0.54}
READ_STATES_ALONE = ("eagle", "medusa", "hydra", "block")  # as untrained drafts. The others repeat the token itself
BACKENDS: dict[str, dict[str, Any]] = {
    "masks": {"attention": "masked", "pack_weights": False},
    "pieces": {"attention": "split", "pack_weights": False},
    "pages": {"attention": "masked", "pack_weights": False, "page_tokens": 16},
    "native": {"attention": "native", "pack_weights": False},
    "packed": {"attention": "native", "pack_weights": True},  # layers, and drafting as a whole, in one call of C++
    "recorded": {"attention": "masked", "pack_weights": False},  # draft loops, as in CUDA graphs
}
IN_CPP = ("native", "packed")
SHORT = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
@torch.no_grad()
def repeating() -> LanguageModel:
    """A target that repeats its last token five times in six, by states that are little more than the token.

    So what untrained drafts copy of it accepts many tokens, if they get its states: the last state says the next ones.
    """
    model = llama()
    for layer in model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):  # type: ignore[union-attr]
            part.weight.mul_(0.02)  # type: ignore[union-attr, operator]
    table = model.model.get_input_embeddings().weight
    table.normal_(generator=torch.Generator().manual_seed(3))
    model.model.get_output_embeddings().weight.copy_(0.065 * table)
    for parameter in model.model.parameters():
        parameter.copy_(parameter.bfloat16().half())  # what packed weights hold exactly
    return model


def engine_by(backend: str, target: LanguageModel, draft: LanguageModel, seed: int = 0) -> Engine:
    """Return an engine that computes this way. All is checked: a backend that gives way to another tests nothing."""
    settings = EngineConfig(
        controller="fixed",
        verification="exact_by_token",
        speculation_length=3,
        max_slots=4,
        max_model_len=64,
        compile=False,
        seed=seed,
        **BACKENDS[backend],
    )
    engine = Engine(target, draft, settings, recorder=FakeRecorder() if backend == "recorded" else None)
    assert isinstance(engine.proposer, DraftModel)
    for runner in (engine.runner, engine.proposer.runner):
        assert runner.prepared is not None
        assert isinstance(runner.cache, PagedCache) == (backend == "pages")
    assert (engine.runner.prepared.native is not None) == (backend == "packed")
    assert (engine.proposer.runner.prepared.steps is not None) == (backend == "packed")
    return engine


def accepted(served: Any, engine: Engine) -> float:
    """Return the share of drafted tokens that is accepted, and close the engine."""
    try:
        tried, _ = served.serve(engine, PROMPTS, SHORT)
    finally:
        engine.close()
    return fmean(each.accepted for each in tried)


def untrained(kind: str, target: LanguageModel) -> LanguageModel:
    return draft_of(kind, target, noise=0.003)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", MEDIANS)
def test_no_draft_is_dead(repeating: LanguageModel, served: Any, kind: str, backend: str) -> None:
    if backend in IN_CPP and why_not() is not None:
        pytest.skip(f"no kernel here: {why_not()}")
    assert accepted(served, engine_by(backend, repeating, untrained(kind, repeating))) > MEDIANS[kind] / 2


@pytest.mark.parametrize("kind", READ_STATES_ALONE)
def test_a_draft_that_gets_no_states_is_below_the_floor(repeating: LanguageModel, served: Any, kind: str) -> None:
    draft = untrained(kind, repeating)
    assert draft.state_input is not None
    draft.state_input.register_forward_pre_hook(lambda _, read: (read[0], torch.zeros_like(read[1]), *read[2:]))
    assert accepted(served, engine_by("masks", repeating, draft)) < MEDIANS[kind] / 2
