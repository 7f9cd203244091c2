"""The target of a run that trained it too: drafts are judged under it, and on its own answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distillspec.commands.held_out import prepare_held_out
from distillspec.commands.held_out_evaluator import HeldOutEvaluator
from distillspec.commands.new_target import open_new_target, quick_with
from distillspec.config import DataConfig, DraftConfig, EvaluationConfig, TargetConfig, TrainCommand
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.evaluation import TargetStates
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.target_copy import TargetCopy, save_target
from distillspec.types import Prompt

CONFIG = TrainCommand(
    target=TargetConfig(path="tiny", dtype="float32", device="cpu"),
    draft=DraftConfig(kind="medusa", train_target=True),
    data=DataConfig(max_new_tokens=8),
    evaluation=EvaluationConfig(measure_cost=False, bootstrap_samples=10),
)


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    folder = DataFolder(tmp_path / "data")
    held_out = tuple(Prompt(f"p{i}", (1, 20 + i, 30 + i)) for i in range(4))
    folder.write_prompts(PromptSet((Prompt("t", (1, 9)),), held_out))
    return folder


@pytest.fixture
def evaluator(target: LanguageModel, data: DataFolder) -> HeldOutEvaluator:
    """Judges under the old target, on its answers."""
    answers = prepare_held_out(CONFIG.data, CONFIG.sampling.policy, target, data, seed=0)
    return HeldOutEvaluator(CONFIG, answers, TargetStates(target))


def step(copy: TargetCopy) -> LanguageModel:
    with torch.no_grad():
        for parameter in copy.trained.layers.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    return copy.refresh()


def test_a_draft_is_evaluated_under_the_target_as_it_is_now(target: LanguageModel, evaluator: HeldOutEvaluator) -> None:
    draft, copy = initialise_draft(CONFIG.draft, target), TargetCopy(target, "new")
    evaluate = quick_with(copy, evaluator)
    found = [evaluator.quick(draft)["eval/alpha"], evaluate(draft)["eval/alpha"]]
    assert found[0] == found[1], "not trained yet"
    for _ in range(2):
        now = HeldOutEvaluator(CONFIG, evaluator.held_out, TargetStates(step(copy))).quick(draft)["eval/alpha"]
        assert evaluate(draft)["eval/alpha"] == now
        found.append(now)
    assert len(set(found)) == 3


def test_the_figures_are_those_on_the_new_targets_answers(
    target: LanguageModel, evaluator: HeldOutEvaluator, data: DataFolder, tmp_path: Path
) -> None:
    new = step(TargetCopy(target, str(tmp_path / "target")))
    save_target(new, tmp_path / "target")
    found = open_new_target(CONFIG, tmp_path, data, evaluator)
    assert found.target.identity == new.identity
    assert found.evaluator.states.target is found.target
    answers = prepare_held_out(CONFIG.data, CONFIG.sampling.policy, new, data, seed=0)
    assert [s.response_ids for s in found.evaluator.held_out] == [s.response_ids for s in answers]
    assert [s.response_ids for s in answers] != [s.response_ids for s in evaluator.held_out]
    assert found.change.tokens == sum(len(s.response_ids) for s in evaluator.held_out)
    assert found.change.kl > 0
    assert found.line.endswith(f"target.path={tmp_path / 'target'}")
    said = found.to_json()
    assert (said["target"], said["target_change"]["line"]) == (str(tmp_path / "target"), found.line)
    assert said["target_change"]["kl"] == found.change.kl
