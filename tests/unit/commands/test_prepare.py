"""The steps that commands share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from distillspec.commands import prepare
from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import PromptSet
from distillspec.models import LanguageModel
from distillspec.types import Prompt


def test_scoring_ends_at_its_limit_and_is_not_taken_up_again(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    plain = prepare.score

    def slow(*args):
        now[0] += 40.0
        return plain(*args)

    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(prepare, "score", slow)
    folder = DataFolder(tmp_path)
    folder.write_prompts(PromptSet(tuple(Prompt(str(i), (1, 30 + i), response="ab") for i in range(100)), ()))
    config = DataConfig(source="fixed", prompts="f.jsonl", max_minutes=1.0, signal_entries=4)
    samples = prepare.prepare_samples(config, target, folder, 0)
    assert len(samples) == 2 * prepare.SCORED_TOGETHER
    assert "left out 36 responses: data.max_minutes=1 were over" in capsys.readouterr().out
    assert len(prepare.prepare_samples(config, target, folder, 0)) == len(samples)
    assert now == [80.0]
