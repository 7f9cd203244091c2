"""The engine accepts what the evaluator says, for every kind of draft: same texts, same places."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DraftConfig, EngineConfig, TargetConfig
from distillspec.models import LanguageModel, initialise_draft, load_target
from distillspec.serving import Engine, SamplingParams

from ..unit.models.state_drafts import KINDS, state_draft

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = [[(7 * place + 11 * number) % 200 + 3 for place in range(5 + number)] for number in range(12)]


@pytest.fixture
def target() -> LanguageModel:
    return load_target(TargetConfig(path="tiny", dtype="float32"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("served_acceptance")


def draft_of(kind: str, model: LanguageModel) -> LanguageModel:
    if kind == "tokens":
        return initialise_draft(DraftConfig(layers=2), model)
    return state_draft(kind, model, noise=0.02)


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
