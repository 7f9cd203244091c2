"""A launch of several processes that is interrupted, or loses a process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
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
from distillspec.errors import RunError
from distillspec.training.checkpoint import load_newest

from .distributed_runs import WORDS, WORLD, Run

pytestmark = pytest.mark.dist

PATIENCE_S = 120.0  # three processes import torch, perhaps beside other tests that do
TRACKER = "wandb" if importlib.util.find_spec("wandb") is not None else "none"


@pytest.mark.long
def test_an_interrupted_launch_resumes_where_it_stopped(
    alone: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal reaches the parent process of the command line. W&B's run continues too."""
    words = (
        *(word for word in WORDS if not word.startswith("data.num_prompts")),  # the cache has its own
        "launcher=ddp",
        f"tracker={TRACKER}",
        f"data.cache={alone.folder}",
        "evaluation.bootstrap_samples=10",
        "train.warmup_fraction=0",  # with a constant rate the length of the run does not matter
        "train.eval_every=100000",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    run = Run(tmp_path / "run", alone.config, alone.target)
    with distill(*words, "train.max_steps=100000") as process:
        wait_for(lambda: (run.folder / "metrics.jsonl").is_file() and len(run.steps()) >= 3, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].endswith(f"continue with: distill train resume={run.folder}")
    stopped = load_newest(run.folder / "checkpoints")[0].progress.step
    assert stopped == run.steps()[-1]["step"] >= 3
    assert_one_tracked_run(run.folder, sittings=1)
    capfd.readouterr()
    code = main(["train", f"resume={run.folder}", f"train.max_steps={stopped + 2}"])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "acceptance rate α" in out
    assert_one_tracked_run(run.folder, sittings=2)
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == stopped + 2
    settings = dataclasses.replace(alone.config.train, max_steps=stopped + 2, eval_every=100_000, warmup_fraction=0.0)
    whole = alone.spread(tmp_path / "whole", "ddp", train=dataclasses.replace(settings, accumulate=1))
    whole.launch()
    assert [step["step"] for step in run.steps()] == list(range(1, stopped + 3))
    assert [untimed(step) for step in run.steps()] == [untimed(step) for step in whole.steps()]


def test_a_process_that_dies_ends_the_run_at_once(alone: Run, tmp_path: Path) -> None:
    run = alone.spread(tmp_path / "run", "ddp")
    script = tmp_path / "rank.py"
    # The other process waits at the same batch. The launch must end it.
    script.write_text(
        "import os, sys, time\nfrom distillspec.commands import train_rank\nfrom distillspec.training import feed\n"
        "plain = feed.SampleFeed.take\n"
        "def take(self):\n"
        "    open(sys.argv[1] + f'/pid-{self.rank}', 'w').write(str(os.getpid()))\n"
        "    if self.next_batch == 3:\n"
        "        self.rank == 1 and os.kill(os.getpid(), 9)\n"
        "        time.sleep(300)\n"
        "        open(sys.argv[1] + '/ended-by-itself', 'w').close()\n"
        "    return plain(self)\n"
        "feed.SampleFeed.take = take\ntrain_rank.leave(train_rank.main())\n"
    )
    with pytest.raises(RunError, match=r"process 1 of 2 was ended by SIGKILL.*see .*rank-1\.log") as failed:
        run.launch([sys.executable, str(script)])
    assert "\n" not in str(failed.value)
    assert not (run.folder / "ended-by-itself").exists()
    for rank in range(WORLD):
        assert not is_alive(int((run.folder / f"pid-{rank}").read_text()))


def assert_one_tracked_run(folder: Path, sittings: int) -> None:
    """One process of each launch wrote to W&B, offline, and always to the same run."""
    if TRACKER == "none":
        return
    name = (folder / "wandb_run_id").read_text().strip()
    records = sorted(path.name for path in (folder / "wandb").glob("offline-run-*/*.wandb"))
    assert records == [f"run-{name}.wandb"] * sittings


def untimed(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key not in ("seconds", "train/tokens_per_s")}


@contextmanager
def distill(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`distill train` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "distillspec.cli", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()  # closes its pipes: left open, they fail another test


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < end
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
