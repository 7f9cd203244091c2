"""Folders of runs: one for each command, also of those that start in the same second, and one for a whole sweep."""

from __future__ import annotations

import itertools
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from distillspec.errors import ConfigError, RunError
from distillspec.hydra_run import run_with_hydra


class OneSecond(datetime):
    """A clock that shows the same second for ever. Each look at it takes a microsecond."""

    looks = itertools.count()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> OneSecond:
        return cls(2026, 12, 1, 10, 20, 30, next(cls.looks))


@pytest.fixture(autouse=True)
def _within_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hydra.core.utils.datetime", OneSecond)


def folders(*words: str) -> list[Path]:
    """Run `distill report` and return the folders that it was given."""
    given: list[Path] = []

    def run(config: Any, folder: Path) -> None:
        given.append(folder)

    GlobalHydra.instance().clear()
    assert run_with_hydra("report", list(words), run, None) == 0
    return given


def test_commands_of_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    found = [*folders("runs=[r]"), *folders("runs=[r]")]
    assert len(set(found)) == 2
    assert {folder.parent for folder in found} == {tmp_path / "runs/report"}
    assert all(folder.name.startswith("2026-12-01_10-20-30-") for folder in found)


def test_runs_of_a_sweep_share_its_folder_and_two_sweeps_none(tmp_path: Path) -> None:
    sweeps = [folders("-m", "runs=[r]", "title=a,b") for _ in range(2)]
    assert [[folder.name for folder in sweep] for sweep in sweeps] == [["0_runs_r_title_a", "1_runs_r_title_b"]] * 2
    assert [len({folder.parent for folder in sweep}) for sweep in sweeps] == [1, 1]
    assert len(list((tmp_path / "runs/report-sweep").iterdir())) == 2


def test_a_folder_that_was_named_is_used_again(tmp_path: Path) -> None:
    assert [*folders("runs=[r]", "hydra.run.dir=mine"), *folders("runs=[r]", "hydra.run.dir=mine")] == [
        tmp_path / "mine",
        tmp_path / "mine",
    ]


@pytest.mark.parametrize("there", [True, False])
def test_a_refused_run_leaves_a_folder_that_was_there_before(tmp_path: Path, there: bool) -> None:
    """It may be that of a server that runs: until it stops there is nothing in it but a log."""
    if there:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/server.log").write_text("started")

    def run(config: Any, folder: Path) -> None:
        raise ConfigError("port 8000 is taken")

    GlobalHydra.instance().clear()
    with pytest.raises(ConfigError, match="taken"):
        run_with_hydra("report", ["runs=[r]", "hydra.run.dir=mine"], run, None)
    assert (tmp_path / "mine/server.log").exists() == there
    assert (tmp_path / "mine").exists() == there


def test_a_refused_run_leaves_the_settings_of_the_run_that_was_there(tmp_path: Path) -> None:
    refuses = [False]

    def run(config: Any, folder: Path) -> None:
        (folder / "config.yaml").write_text(str(config.title))
        if refuses[0]:
            raise ConfigError("mine holds a run already")

    words = ["runs=[r]", "hydra.run.dir=mine"]
    GlobalHydra.instance().clear()
    assert run_with_hydra("report", [*words, "title=first"], run, None) == 0
    before = (tmp_path / "mine/.hydra/overrides.yaml").read_text()
    refuses[0] = True
    GlobalHydra.instance().clear()
    with pytest.raises(ConfigError, match="already"):
        run_with_hydra("report", [*words, "title=second"], run, None)
    assert (tmp_path / "mine/.hydra/overrides.yaml").read_text() == before
    assert "second" not in (tmp_path / "mine/.hydra/config.yaml").read_text()
    assert (tmp_path / "mine/config.yaml").read_text() == "first"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_no_memory_is_one_line_that_names_what_to_lower(error: Exception) -> None:
    told = (
        r"^out of memory; lower train.batch_tokens, loss.chunk_tokens, data.batch_slots, "
        r"and continue with distill train resume=mine$"
    )

    def run(config: Any, folder: Path) -> None:
        raise error

    GlobalHydra.instance().clear()
    with pytest.raises(RunError, match=told):
        run_with_hydra("train", ["hydra.run.dir=mine"], run, None)
    GlobalHydra.instance().clear()
    with pytest.raises(RunError, match=r"^out of memory$"):
        run_with_hydra("report", ["runs=[r]"], run, None)


def test_other_errors_keep_their_traceback() -> None:
    def run(config: Any, folder: Path) -> None:
        raise RuntimeError("shapes do not match")

    GlobalHydra.instance().clear()
    with pytest.raises(RuntimeError, match="shapes"):
        run_with_hydra("report", ["runs=[r]"], run, None)
