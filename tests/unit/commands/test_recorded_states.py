"""States that are stored with text: those that the draft of the run reads, new or continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.commands.recorded_states import recording
from distillspec.config import DataConfig, DraftConfig, TrainCommand
from distillspec.models import LanguageModel, initialise_draft, save_draft


@pytest.fixture
def reader(target: LanguageModel, tmp_path: Path) -> str:
    """A draft that reads the states 1 and 2."""
    save_draft(initialise_draft(DraftConfig(kind="eagle", feature_ids=[1, 2]), target), tmp_path / "draft", target)
    return str(tmp_path / "draft")


def test_a_draft_that_goes_on_finds_its_states_recorded(target: LanguageModel, reader: str) -> None:
    asked = TrainCommand(draft=DraftConfig(kind="pretrained", path=reader))
    assert recording(asked, target).state_ids == [1, 2]
    new = TrainCommand(draft=DraftConfig(kind="eagle", feature_ids=[0, 3]))
    assert recording(new, target).state_ids == [0, 3]


def test_states_that_nobody_reads_are_not_recorded(target: LanguageModel, reader: str) -> None:
    assert recording(TrainCommand(draft=DraftConfig(layers=1)), target).state_ids is None
    named = DataConfig(state_ids=[3])
    assert recording(TrainCommand(draft=DraftConfig(kind="pretrained", path=reader), data=named), target) is named
    engine = DataConfig(generator="engine")
    assert recording(TrainCommand(draft=DraftConfig(kind="pretrained", path=reader), data=engine), target) is engine
