"""Text that a draft's stop head is taught by, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distillspec.commands.run_folder import open_run
from distillspec.config import DraftConfig, DraftPathConfig, TargetConfig, TrainCommand, TrainStopCommand
from distillspec.config.train_stop import StopConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.shards import ShardWriter
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving.commands import train_stop
from distillspec.types import Prompt, Sample

PROMPTS = tuple(Prompt(f"p{i}", (1, 30 + i)) for i in range(12))


@pytest.fixture
def run(target: LanguageModel, tmp_path: Path) -> Path:
    """A training run: a draft, and text of which short answers ended first, the last prompts' ones."""
    folder = tmp_path / "trained"
    open_run(folder, TrainCommand())
    save_draft(initialise_draft(DraftConfig(layers=1), target), folder / "draft", target)
    data = DataFolder(folder / "data")
    data.write_prompts(PromptSet(PROMPTS, ()))
    writer = ShardWriter(data.samples, {"target": asdict(target.identity)}, shard_sequences=20)
    for prompt in reversed(PROMPTS):
        length = 16 - int(prompt.id[1:])
        writer.add(Sample(prompt.id, "d", prompt.token_ids, tuple(range(40, 40 + length)), source="teacher"))
    writer.flush(complete=True)
    return folder


def command(draft: Path, **stop: Any) -> TrainStopCommand:
    return TrainStopCommand(
        draft=DraftPathConfig(str(draft)),
        target=TargetConfig(path="tiny", dtype="float32", device="cpu"),
        stop=StopConfig(width=8, epochs=1, **stop),
    )


def test_the_first_prompts_answers_teach_not_those_that_ended_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = train_stop.stop_examples

    def watched(head: Any, draft: Any, states: Any, samples: Sequence[Sample], *rest: Any) -> Any:
        read.extend(sample.prompt_id for sample in samples)
        return plain(head, draft, states, samples, *rest)

    monkeypatch.setattr(train_stop, "stop_examples", watched)
    train_stop.run(command(run, answers=6), tmp_path / "stop")
    assert sorted(read) == [f"p{i}" for i in range(6)]


def test_it_is_said_if_the_draft_knows_the_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = "(they taught the draft, and of such text more is accepted than of other)"
    train_stop.run(command(run), tmp_path / "own")
    assert known in capsys.readouterr().out
    (run / "config.yaml").rename(tmp_path / "elsewhere.yaml")
    train_stop.run(command(run, text=str(run)), tmp_path / "other")
    said = capsys.readouterr().out
    assert "tokens that taught it nothing, acceptance is" in said
    assert known not in said


def test_a_run_without_text_is_told_by_its_own_setting(run: Path, tmp_path: Path) -> None:
    (run / "data" / "samples").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"^stop\.text=.*data has no manifest\.json; make the folder with"):
        train_stop.run(command(run), tmp_path / "stop")
