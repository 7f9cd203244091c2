"""A run that goes on in its folder keeps the text and the draft that it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.commands.run_folder import CONFIG, open_run
from distillspec.commands.same_run import BEFORE, check_same_run
from distillspec.config import DataConfig, DraftConfig, EvaluationConfig, TrainCommand, TrainConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.data.shards import ShardWriter
from distillspec.errors import ConfigError
from distillspec.files import write_json
from distillspec.types import Prompt

FIRST = TrainCommand(train=TrainConfig(max_steps=2), data=DataConfig(num_prompts=4, max_minutes=1.0))
PROMPTS = PromptSet((Prompt("a", (1, 2)),), (Prompt("b", (3,)),))


def resumed(folder: Path) -> TrainCommand:
    return replace(FIRST, resume=str(folder))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder in which nothing has been made yet."""
    folder = tmp_path / "run"
    open_run(folder, FIRST)
    return folder


def test_before_anything_is_made_all_settings_may_change(run: Path) -> None:
    other = replace(FIRST, draft=DraftConfig(layers=2), data=DataConfig(num_prompts=9), seed=7)
    check_same_run(other, run)
    check_same_run(other, run.parent / "new")


def test_with_prompts_the_text_is_settled_and_the_draft_is_not(run: Path) -> None:
    DataFolder(run / "data").write_prompts(PROMPTS)
    base = resumed(run)
    check_same_run(replace(base, draft=DraftConfig(layers=2)), run)
    check_same_run(replace(base, data=replace(FIRST.data, batch_slots=3, max_minutes=9.0)), run)
    for changed, told in (
        (replace(base.data, num_prompts=9), r"data.num_prompts=9: .*run was made with 4; begin a new run"),
        (replace(base.data, max_new_tokens=7), r"data.max_new_tokens=7"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_same_run(replace(base, data=changed), run)
    with pytest.raises(ConfigError, match="seed=7"):
        check_same_run(replace(base, seed=7), run)


def test_files_may_move_and_on_policy_text_is_still_to_be_written(run: Path, tmp_path: Path) -> None:
    write_json(run / BEFORE, {})
    base = resumed(run)
    new = tmp_path / "new.jsonl"
    new.write_text("")
    moved = replace(base.data, prompts=str(new), refresh_steps=7)
    check_same_run(replace(base, data=moved), run)
    other = tmp_path / "other.jsonl"
    other.write_text("")
    open_run(run, replace(base, data=moved))
    with pytest.raises(ConfigError, match=r"data.prompts=.*other.jsonl: .* was made with .*new.jsonl"):
        check_same_run(replace(base, data=replace(moved, prompts=str(other))), run)
    (tmp_path / "link.jsonl").symlink_to(new)
    check_same_run(replace(base, data=replace(moved, prompts=str(tmp_path / "link.jsonl"))), run)


def test_all_answers_settle_the_minutes_for_them(run: Path) -> None:
    folder = DataFolder(run / "data")
    folder.write_prompts(PROMPTS)
    ShardWriter(folder.samples, {"seed": 0}, 4).flush(complete=True)
    with pytest.raises(ConfigError, match=r"data.max_minutes=9.0: .* was made with 1.0"):
        check_same_run(replace(resumed(run), data=replace(FIRST.data, max_minutes=9.0)), run)


def test_a_measured_draft_settles_the_draft_and_what_is_compared(run: Path) -> None:
    write_json(run / BEFORE, {})
    base = resumed(run)
    check_same_run(replace(base, train=replace(FIRST.train, max_steps=9, max_minutes=3.0, learning_rate=1e-4)), run)
    with pytest.raises(ConfigError, match=r"draft.layers=2"):
        check_same_run(replace(base, draft=DraftConfig(layers=2)), run)
    with pytest.raises(ConfigError, match=r"train.eval_max_prompts=3"):
        check_same_run(replace(base, train=replace(FIRST.train, eval_max_prompts=3)), run)
    with pytest.raises(ConfigError, match=r"sampling.temperature=0"):
        check_same_run(replace(base, sampling=replace(FIRST.sampling, temperature=0.0)), run)


def test_another_run_does_not_begin_in_the_folder_of_one(run: Path) -> None:
    checkpoint = run / "checkpoints/step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run holds a run already; continue it with resume="):
        check_same_run(FIRST, run)
    check_same_run(resumed(run), run)


def test_a_renamed_setting_of_an_earlier_version_is_compared(run: Path) -> None:
    write_json(run / BEFORE, {})
    config = run / CONFIG
    config.write_text(config.read_text().replace("  speculation_length: 8", "  max_gamma: 8"))
    assert "max_gamma" in config.read_text()
    check_same_run(resumed(run), run)
    with pytest.raises(ConfigError, match=r"evaluation\.speculation_length=5: .* was made with 8"):
        check_same_run(replace(resumed(run), evaluation=EvaluationConfig(speculation_length=5)), run)
