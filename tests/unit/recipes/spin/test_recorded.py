"""Regret on answers of live drafts needs what their passes cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distillspec.config import DraftConfig
from distillspec.errors import RunError
from distillspec.models import LanguageModel, initialise_draft
from distillspec.recipes.spin.answers import SeededPrompt
from distillspec.recipes.spin.recorded import machine_of, recorded_regret
from distillspec.recipes.spin.regret import LEARNING, Regret
from distillspec.serving import Engine, EngineSettings
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

COST = CostTable.line(1e-8, 1e-5, 1e-3)
ANSWERS, TOKENS = 16, 8


@pytest.fixture
def engine(target: LanguageModel) -> Iterator[Engine]:
    """An engine of two drafts that has measured nothing."""
    drafts = {name: initialise_draft(DraftConfig(layers=layers), target) for name, layers in (("one", 1), ("two", 3))}
    settings = EngineSettings(max_slots=2, max_model_len=64, compile=False, measure_costs_s=0.0)
    made = Engine(target, drafts, settings)
    yield made
    made.close()


def test_without_measured_costs_nothing_is_simulated(engine: Engine) -> None:
    with pytest.raises(RunError, match="costs of the drafts one, two have not been measured"):
        machine_of(engine)
    engine.use_costs(LatencyModel(COST, COST, members={"one": COST}))
    with pytest.raises(RunError, match="measured, only those of one"):
        machine_of(engine)


def test_selections_are_judged_on_what_was_accepted_of_each_draft(engine: Engine) -> None:
    engine.use_costs(LatencyModel(COST, COST, members={"one": COST, "two": COST}))
    prompts = [SeededPrompt("a", (5 + seed, 9, 7), seed) for seed in range(ANSWERS)]
    regret = recorded_regret(engine, prompts, TOKENS, Regret(seeds=1))
    assert regret["answers"][-1] == regret["alike"] == ANSWERS, "greedy texts are the same whatever drafts"
    assert set(regret["regret"]) == set(LEARNING)
    assert set(regret["tried"]) == {"one", "two"}
    assert all(0 < share <= 1 for share in regret["tried"].values())
