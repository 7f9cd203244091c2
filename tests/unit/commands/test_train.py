"""Training alone and in several processes: lines that are printed, and memory that is shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, PartialState

from distillspec.commands import train, train_rank
from distillspec.commands.samples import prepare_samples
from distillspec.config import (
    DataConfig,
    DraftConfig,
    LauncherConfig,
    TargetConfig,
    TrackerConfig,
    TrainCommand,
    TrainConfig,
)
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.training.schedule import Progress
from distillspec.training.state_store import GIB
from distillspec.training.trainer import RunHooks, TrainResult
from distillspec.types import Prompt, Sample

CONFIG = TrainCommand(
    train=TrainConfig(max_steps=10, dtype="float32"),
    target=TargetConfig(path="tiny", device="cpu"),
    data=DataConfig(source="draft"),
    tracker=TrackerConfig(kind="none"),
    resume="run",
)
DONE = TrainResult(Progress(step=10), "steps", {"step": 2, "alpha": 0.5}, 0)


class ResumedTrainer:
    """Was at α 0.5 before the interruption, and is now at 0.2."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        (hooks,) = [arg for arg in args if isinstance(arg, RunHooks)]
        self.report, self.progress = hooks.report, Progress(step=5)
        self.best: dict[str, Any] | None = None

    def resume(self) -> list[str]:
        self.best = {"step": 2, "alpha": 0.5}
        return []

    def run(self) -> TrainResult:
        self.report(self.progress, {"eval/alpha": 0.2})
        return DONE


def test_a_resumed_run_that_had_learned_is_not_warned(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "initial", target)
    write_json(tmp_path / train.BEFORE, {"selection_alpha": 0.3})
    data = DataFolder(tmp_path / "data")
    data.write_prompts(PromptSet((Prompt("a", (1, 2)),), (Prompt("b", (1, 3)),)))
    monkeypatch.setattr(train, "Trainer", ResumedTrainer)
    monkeypatch.setattr(train, "has_checkpoint", lambda folder: True)
    held_out = [Sample("b", "d", (1, 3), (4, 5), None)]
    assert train.train(CONFIG, tmp_path, target, data, [], held_out) == DONE
    assert "nothing learned" not in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_do_not_repeat_what_the_launching_process_has_said(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*args: Any) -> tuple[None, list[Sample], list[Sample]]:
        print("only 2 held-out prompts of data.eval_prompts=4")
        return None, [], []

    monkeypatch.setattr(train_rank, "read_config", lambda folder: CONFIG)
    monkeypatch.setattr(train_rank, "load_target", lambda config: None)
    monkeypatch.setattr(train_rank, "prepare", prepare)
    monkeypatch.setattr(train_rank, "train", lambda *args: DONE)
    train_rank.run(tmp_path, rank)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_ranks_share_the_memory_for_states_and_the_launching_process_takes_none(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[float] = []

    def ended(*args: Any, state_bytes: float) -> None:
        rooms.append(state_bytes)
        raise InterruptedError

    monkeypatch.setattr(train, "prepare_folder", lambda *args: DataFolder(tmp_path))
    monkeypatch.setattr(train, "prepare_samples", ended)
    settings = replace(CONFIG.train, feature_gib=4.0)
    alone = replace(CONFIG, draft=DraftConfig(kind="eagle"), data=DataConfig(), train=settings, resume=None)
    spread = replace(alone, launcher=LauncherConfig("ddp", 2))
    for attempt in (
        lambda: train.run(alone, tmp_path),
        lambda: train.run(spread, tmp_path),
        lambda: train.prepare(spread, tmp_path, target),
    ):
        with pytest.raises(InterruptedError):
            attempt()
    assert rooms == [4 * GIB, 0, 2 * GIB]


def test_responses_of_the_file_are_looked_for_before_training(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "initial", target)
    data = DataFolder(tmp_path / "data")
    data.write_prompts(PromptSet((Prompt("a", (1, 2)),), (Prompt("b", (1, 3)),)))
    monkeypatch.setattr(train, "Trainer", ResumedTrainer)
    mixed = replace(CONFIG, data=DataConfig(source="mixed", mixed_with="fixed", prompts="f.jsonl"), resume=None)
    held_out = [Sample("b", "d", (1, 3), (4, 5), None)]
    with pytest.raises(ConfigError, match=r"data\.mixed_with=fixed found no responses"):
        train.train(mixed, tmp_path, target, data, [], held_out)


def test_a_typed_signal_is_the_caches_own(target: LanguageModel, tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "data")
    data.write_prompts(PromptSet((Prompt("a", (1, 2)),), (Prompt("b", (1, 3)),)))
    prepare_samples(DataConfig(signal="hidden", max_new_tokens=2), target, data, 0)
    cached = DataConfig(cache=str(data.root), eval_prompts=1, max_new_tokens=2)
    config, run = replace(CONFIG, data=cached, resume=None), tmp_path / "run"
    assert len(train.prepare(config, run, target)[1]) == 1, "without a word the cache decides"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("- data.signal=topk\n")
    with pytest.raises(ConfigError, match=r"data\.signal=topk: the text of data\.cache=.* with data\.signal=hidden"):
        train.prepare(config, run, target)
    assert train.prepare(replace(config, resume=str(run)), run, target)[1], "earlier versions took it"
