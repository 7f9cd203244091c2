"""States that are kept between runs, in a folder that may be another's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from distillspec.evaluation import TargetStates
from distillspec.models import LanguageModel
from distillspec.types import Sample

SAMPLE = Sample("p", "d", (5, 9, 11), (40, 41, 2, 250, 6, 7, 12))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EROFS, "Read-only file system"), SafetensorError("I/O error: Permission denied (os error 13)")],
    ids=["system", "safetensors"],
)
def test_states_are_used_where_they_cannot_be_kept(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: object) -> None:
        raise error

    states = TargetStates(target, tmp_path / "states")
    wanted = states.hidden(SAMPLE)
    with monkeypatch.context() as patched:
        patched.setattr("distillspec.evaluation.states.save_file", refuse)
        states.save()
    assert list((tmp_path / "states").iterdir()) == []
    assert torch.equal(states.hidden(SAMPLE), wanted)
    states.save()  # once it can be written to
    assert [file.suffix for file in (tmp_path / "states").iterdir()] == [".safetensors"]
