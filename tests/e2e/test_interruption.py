"""SIGINT and SIGTERM save the state, say how to go on, and cost nothing of the result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distillspec.cli import main
from distillspec.errors import Terminated

STEPS = 60
LONG = (
    "experiment=smoke",
    f"train.max_steps={STEPS}",
    "train.eval_every=1000",
    "train.dtype=float32",
    "evaluation.measure_cost=false",
    "evaluation.bootstrap_samples=10",
)
TIMINGS = {"seconds", "train/tokens_per_s"}
# `distill` that waits in its fifth step until the file `signalled` is there: all its steps take a second, and a signal
# that comes after the last one stops nothing.
WAITING = """
import itertools, pathlib, sys, time
from distillspec import cli
from distillspec.training import feed

plain, steps = feed.SampleFeed.take, itertools.count(1)

def take(self):
    if next(steps) == 5:
        while not pathlib.Path("signalled").exists():
            time.sleep(0.01)
    return plain(self)

feed.SampleFeed.take = take
sys.exit(cli.main())
"""


def untimed(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]


@pytest.fixture(scope="module")
def whole(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words(data_folder)) == 0
    return folder / "run"


def words(data_folder: Path) -> list[str]:
    return ["train", *LONG, f"data.cache={data_folder}", "hydra.run.dir=run"]


@contextmanager
def training(folder: Path, data_folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *words(data_folder)],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_steps(process: subprocess.Popen[str], metrics: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while not metrics.is_file() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_training_saves_and_resuming_ends_the_same(
    distill: Any, tmp_path: Path, data_folder: Path, whole: Path, number: int, code: int
) -> None:
    with training(tmp_path, data_folder) as process:
        wait_for_steps(process, tmp_path / "run" / "metrics.jsonl", 4)
        os.kill(process.pid, number)
        (tmp_path / "signalled").touch()
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, (out, err)
    assert "Traceback" not in out + err
    last = err.strip().splitlines()[-1]
    assert last == f"distill: interrupted, state saved; continue with: distill train resume={tmp_path / 'run'}"
    done = len(untimed(tmp_path / "run"))
    assert 4 <= done < STEPS
    assert not (tmp_path / "run" / "summary.json").exists()

    resumed = distill("train", "resume=run")  # another process than the one that was stopped
    assert resumed.code == 0, resumed.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == STEPS
    assert untimed(tmp_path / "run") == untimed(whole)
    for name in ("best", "draft"):
        ours, theirs = (run / name / "model.safetensors" for run in (tmp_path / "run", whole))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_before_training_loses_only_unfinished_work(
    distill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    """While the target still writes: the finished shards stay, and the run goes on where it was."""

    def stop(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("distillspec.commands.train.prepare_held_out", stop)
    outcome = distill("train", *LONG, "train.max_steps=2", "data.num_prompts=6", "hydra.run.dir=run")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert outcome.code == code
    assert outcome.err == "distill: interrupted, state saved; continue with: distill train resume=run\n"
    shards = {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "data" / "samples").iterdir()}
    assert shards
    resumed = distill("train", "resume=run")
    assert resumed.code == 0, resumed.err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "data" / "samples").iterdir()} == shards


def test_a_command_that_cannot_resume_says_only_that_it_stopped(distill: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distillspec.commands.init_draft.load_target", stop)
    outcome = distill("init-draft", "target=tiny")
    assert (outcome.code, outcome.err) == (130, "distill: interrupted\n")


def test_a_signal_stops_a_sweep(distill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distillspec.commands.train.load_target", stop)
    outcome = distill("train", "-m", "experiment=smoke", "seed=1,2")
    assert outcome.code == 130
    assert len(list(tmp_path.rglob("config.yaml"))) == 2  # ours and Hydra's, of the first run alone


def test_signals_are_handled_as_before_afterwards(distill: Any) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    distill("--help")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_run_killed_before_its_first_checkpoint_begins_its_curves_anew(
    distill: Any, tmp_path: Path, data_folder: Path
) -> None:
    assert distill(*words(data_folder), "train.max_steps=2").code == 0
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").mkdir()  # a save that was cut off leaves the folder
    assert distill("train", "resume=run").code == 0
    assert [line["step"] for line in untimed(tmp_path / "run") if "train/lr" in line] == [1, 2]
