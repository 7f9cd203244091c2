"""Held-out answers of two targets to the same prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.commands.held_out import CHECKED, prepare_held_out
from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.target_copy import TargetCopy
from distillspec.types import Prompt, SamplingPolicy

GREEDY = SamplingPolicy(temperature=0)
SETTINGS = DataConfig(max_new_tokens=8)


def test_each_target_has_its_own_answers(target: LanguageModel, tmp_path: Path) -> None:
    copy = TargetCopy(target, "new")
    with torch.no_grad():
        for parameter in copy.trained.layers.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    other = copy.refresh()
    folder = DataFolder(tmp_path)
    held_out = tuple(Prompt(f"p{i}", (1, 20 + i, 30 + i)) for i in range(4))
    folder.write_prompts(PromptSet((Prompt("t", (1, 9)),), held_out))
    answers = [prepare_held_out(SETTINGS, GREEDY, one, folder, seed=0) for one in (target, other, target, other)]
    first, second, again, later = ([sample.response_ids for sample in one] for one in answers)
    assert first != second
    assert (again, later) == (first, second)
    assert len(list((tmp_path / "held_out").iterdir())) == 2


def test_kept_answers_of_another_distribution_are_refused(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = DataFolder(tmp_path), SamplingPolicy()
    held_out = tuple(Prompt(f"p{i}", (1, 20 + i, 30 + i)) for i in range(8))
    folder.write_prompts(PromptSet((Prompt("t", (1, 9)),), held_out))
    settings = DataConfig(max_new_tokens=48)
    written = prepare_held_out(settings, plain, target, folder, seed=0)
    assert prepare_held_out(settings, plain, target, folder, seed=0) == written
    (place,) = (tmp_path / "held_out").iterdir()
    (place / CHECKED).unlink()  # as an early version left it
    other = [replace(sample, response_ids=tuple(reversed(range(3, 51)))) for sample in written]
    monkeypatch.setattr("distillspec.commands.held_out.held_out_samples", lambda *args, **named: other)
    with pytest.raises(ConfigError, match=r"held-out answers in .* nats a token off .*; remove this folder"):
        prepare_held_out(settings, plain, target, folder, seed=0)


def test_finished_answers_are_used_where_nothing_can_be_written(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DataFolder(tmp_path)
    held_out = tuple(Prompt(f"p{i}", (1, 20 + i, 30 + i)) for i in range(4))
    folder.write_prompts(PromptSet((Prompt("t", (1, 9)),), held_out))
    written = prepare_held_out(SETTINGS, GREEDY, target, folder, seed=0)
    (place,) = (tmp_path / "held_out").iterdir()
    before = {file.name: file.stat() for file in place.iterdir() if file.name != CHECKED}

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("there is nothing to write")

    for function in ("data.shards.write_json", "data.shards.write_atomic", "generation.SlotGenerator.generate"):
        monkeypatch.setattr(f"distillspec.{function}", refuse)
    assert prepare_held_out(SETTINGS, GREEDY, target, folder, seed=0) == written
    assert prepare_held_out(replace(SETTINGS, eval_prompts=2), GREEDY, target, folder, seed=0) == written[:2]
    for name, old in before.items():
        new = (place / name).stat()
        assert (new.st_ino, new.st_mtime_ns) == (old.st_ino, old.st_mtime_ns)
