"""The target of a run that trained it too (`draft.train_target`): its answers, its quality beside the old one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distillspec.commands.held_out import prepare_held_out
from distillspec.commands.held_out_evaluator import HeldOutEvaluator
from distillspec.config import TrainCommand
from distillspec.data.folder import DataFolder
from distillspec.evaluation import TargetStates
from distillspec.evaluation.target_change import TargetChange, target_change
from distillspec.models import LanguageModel, load_target
from distillspec.models.target_copy import TargetCopy
from distillspec.training.trainer import TARGET


@dataclass(frozen=True)
class NewTarget:
    """The target that a run wrote, with an evaluator of drafts on its own answers."""

    target: LanguageModel
    evaluator: HeldOutEvaluator
    change: TargetChange

    @property
    def line(self) -> str:
        """Return one line for people."""
        return f"{self.change.line()}; serve the draft with target.path={self.target.name}"

    def to_json(self) -> dict[str, Any]:
        """Return what `summary.json` says of it."""
        return {"target": self.target.name, "target_change": {**asdict(self.change), "line": self.line}}


def quick_with(target_copy: TargetCopy, evaluator: HeldOutEvaluator) -> Callable[[LanguageModel], dict[str, float]]:
    """Return the evaluation of a draft during training: under the target as it is now, on the old one's answers."""
    return lambda draft: replace(evaluator, states=TargetStates(target_copy.served)).quick(draft)


def open_new_target(config: TrainCommand, folder: Path, data: DataFolder, evaluator: HeldOutEvaluator) -> NewTarget:
    """Load the run's target, let it answer the held-out prompts anew, and compare it with the old one."""
    place = folder / TARGET
    target = replace(load_target(replace(config.target, path=str(place))), name=str(place))
    states = TargetStates(target, data.states)
    answers = prepare_held_out(config.data, config.sampling.policy, target, data, config.seed)
    change = target_change(evaluator.states, states, evaluator.held_out)
    return NewTarget(target, replace(evaluator, held_out=answers, states=states), change)
