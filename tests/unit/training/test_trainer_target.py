"""Runs that train the target with the heads: its warm-up, its rate, the pairs that are kept, and resuming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import Interrupted
from distillspec.files import verify_folder
from distillspec.models import LanguageModel, initialise_draft, load_draft, load_target, read_metadata
from distillspec.models.target_copy import TargetCopy
from distillspec.training import trainer as trainer_module
from distillspec.training.schedule import Progress
from distillspec.training.trainer import TARGET, Trainer
from distillspec.types import Sample

from .runs import metrics, stop_at, untimed

MakeJoint = Callable[..., Trainer]


@pytest.fixture
def make_joint(make_trainer: Any, target: LanguageModel, samples: list[Sample]) -> MakeJoint:
    """`make_joint(folder, target=..., train=..., **Trainer arguments)`: `make_trainer` of heads with their target."""
    bare = [Sample(s.prompt_id, s.domain, s.prompt_ids, s.response_ids) for s in samples]

    def make(folder: Path, *, target: LanguageModel = target, train: dict[str, Any] | None = None, **extra: Any) -> Any:
        target_copy = TargetCopy(target, str(folder / TARGET))
        draft = initialise_draft(DraftConfig(kind="medusa", positions=2), target)
        train = {"target_rate": 0.2, **(train or {})}
        return make_trainer(folder, draft=draft, target_copy=target_copy, train=train, samples_=bare, **extra)

    return make


def rising() -> Callable[[LanguageModel], dict[str, float]]:
    """An evaluation by which every checkpoint is the best so far."""
    alphas = iter(range(1, 99))
    return lambda draft: {"eval/alpha": next(alphas) / 100}


def now(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of all weights, `draft.…` and `target.…`."""
    return {name: own.clone() for name, own in trainer.module.model.state_dict().items()}


def of_target(model: LanguageModel) -> dict[str, Tensor]:
    return {f"target.{name}": own for name, own in model.model.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


def open_target(folder: Path) -> LanguageModel:
    return load_target(TargetConfig(path=str(folder / TARGET), dtype="float32", device="cpu"))


def watch(trainer: Trainer) -> dict[int, dict[str, Tensor]]:
    """Return a dictionary that will hold all weights after each step."""
    seen = {0: now(trainer)}

    def report(progress: Progress, values: dict[str, float]) -> None:
        seen.setdefault(progress.step, now(trainer))

    trainer.report = report
    return seen


def test_the_targets_layers_move_after_the_warm_up(make_joint: MakeJoint, tmp_path: Path) -> None:
    trainer = make_joint(tmp_path, train={"target_warmup": 0.5}, evaluate=rising())
    seen = watch(trainer)
    trainer.run()
    learnt = {name for name in seen[0] if name.startswith("target.") and ".layers." in name}
    early, late = moved(seen[0], seen[3]), moved(seen[3], seen[4])
    assert early
    assert all(name.startswith("draft.") for name in early)
    assert {name for name in late if name.startswith("target.")} == learnt
    assert all(line["train/target_kl"] == pytest.approx(0, abs=1e-5) for line in metrics(tmp_path)[:3])
    assert metrics(tmp_path)[-2]["train/target_kl"] > 1e-5


def test_the_target_takes_its_share_of_the_learning_rate(make_joint: MakeJoint, tmp_path: Path) -> None:
    """Adam's first step moves each weight by the learning rate, whatever its gradient."""
    train = {"max_steps": 1, "eval_every": 1, "learning_rate": 1e-3, "target_rate": 0.1, "target_warmup": 0.0}
    trainer = make_joint(tmp_path, train={**train, "schedule": "constant", "warmup_fraction": 0.0}, evaluate=rising())
    seen = watch(trainer)
    trainer.run()
    way = {name: float((seen[1][name] - seen[0][name]).abs().max()) for name in seen[0]}
    steps = [max(way[name] for name in way if name.startswith(part)) for part in ("target.", "draft.")]
    assert steps == pytest.approx([1e-4, 1e-3], rel=0.05)


def test_the_best_draft_and_target_are_of_one_step(make_joint: MakeJoint, tmp_path: Path, target: Any) -> None:
    alphas = iter([0.1, 0.7, 0.3, 0.2])
    train = {"eval_every": 2, "max_steps": 8, "target_warmup": 0.0}
    trainer = make_joint(tmp_path, train=train, evaluate=lambda draft: {"eval/alpha": next(alphas)})
    seen = watch(trainer)
    assert trainer.run().best == {"step": 4, "alpha": 0.7}
    new = open_target(tmp_path)
    assert not moved(seen[4], of_target(new))
    assert moved(seen[4], seen[8])
    assert verify_folder(tmp_path / TARGET) is None
    recorded = read_metadata(tmp_path / "best")["target"]
    assert recorded["weights_hash"] == new.identity.weights_hash != target.identity.weights_hash
    assert recorded["name"] == str(tmp_path / TARGET)
    kept = {name: own.bfloat16() for name, own in load_draft(tmp_path / "best", new).model.state_dict().items()}
    assert not moved({name: seen[4][f"draft.{name}"].bfloat16() for name in kept}, kept)


def test_drafts_are_evaluated_under_the_target_of_their_step_in_its_own_precision(
    make_joint: MakeJoint, tmp_path: Path
) -> None:
    rough = load_target(TargetConfig(path="tiny", dtype="bfloat16", device="cpu"))
    hashes: list[str] = []

    def evaluate(draft: LanguageModel) -> dict[str, float]:
        copy = trainer.target_copy
        assert copy is not None
        pairs = zip(copy.served.model.parameters(), copy.trained.model.parameters(), strict=True)
        assert all(torch.equal(own, theirs.to(torch.bfloat16)) for own, theirs in pairs)
        assert copy.served.dtype == torch.bfloat16
        hashes.append(copy.served.identity.weights_hash)
        return {"eval/alpha": 0.5}

    train = {"eval_every": 1, "max_steps": 3, "target_warmup": 0.0, "schedule": "constant", "learning_rate": 1e-2}
    trainer = make_joint(tmp_path, target=rough, train=train, evaluate=evaluate)
    trainer.run()
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("at", [1, 3, 4])
def test_an_interrupted_run_ends_bit_for_bit_like_a_whole_one(make_joint: MakeJoint, tmp_path: Path, at: int) -> None:
    """Interrupted in the warm-up, at an evaluation and after it."""
    train = {"target_warmup": 0.3}
    whole = make_joint(tmp_path / "whole", train=train)
    whole.run()
    with pytest.raises(Interrupted):
        make_joint(tmp_path / "parts", train=train, **stop_at(at)).run()
    second = make_joint(tmp_path / "parts", train=train)
    assert second.resume() == []
    assert second.progress.step == at
    result = second.run()
    assert result.best == whole.best
    assert not moved(now(whole), now(second))
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")
    ours, theirs = second.strategy.optimizer.state_dict(), whole.strategy.optimizer.state_dict()
    assert len(ours["state"]) == sum(len(group["params"]) for group in ours["param_groups"])
    for number, state in ours["state"].items():
        assert all(torch.equal(value, theirs["state"][number][key]) for key, value in state.items())
    for name in (TARGET, "best"):
        saved = [(tmp_path / run / name / "model.safetensors").read_bytes() for run in ("parts", "whole")]
        assert saved[0] == saved[1]


def test_a_run_killed_while_it_replaced_target_and_draft_keeps_no_pair_of_two_steps(
    make_joint: MakeJoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at step 6 behind the new target. From step 3 on no further evaluation is as good as that of step 3."""
    train = {"target_warmup": 0.0}
    save, saved = trainer_module.save_draft, list[Path]()

    def killed(draft: LanguageModel, folder: Path, *rest: Any, **named: Any) -> None:
        saved.append(folder)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(draft, folder, *rest, **named)

    monkeypatch.setattr(trainer_module, "save_draft", killed)
    with pytest.raises(KeyboardInterrupt):
        make_joint(tmp_path, train=train, evaluate=rising()).run()
    monkeypatch.undo()
    second = make_joint(tmp_path, train=train, evaluate=lambda draft: {"eval/alpha": 0.001})
    second.resume()
    assert second.progress.step == 3
    assert second.run().best == {"step": 6, "alpha": 0.001}
    new = open_target(tmp_path)
    assert read_metadata(tmp_path / "best")["target"]["weights_hash"] == new.identity.weights_hash
    assert not moved(now(second), of_target(new))
