"""Several processes learn what one process learns from the same batches, however the module is spread."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
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
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from distillspec.commands.prepare import prepare_draft
from distillspec.commands.run_folder import open_run
from distillspec.commands.train import prepare, train
from distillspec.composition import compose
from distillspec.config import LauncherConfig, TrainCommand
from distillspec.errors import RunError
from distillspec.files import sha256_of
from distillspec.models import LanguageModel, load_draft, load_target, save_draft
from distillspec.sampling import NonFiniteLogits
from distillspec.training import module
from distillspec.training.checkpoint import load_newest
from distillspec.training.launch import launch

pytestmark = pytest.mark.dist

WORLD = 2
STEPS = 4
ACCUMULATE = 2  # micro-batches a step in each process; a process alone takes twice as many
BAD_STEP = 2
WORDS = (
    "experiment=smoke",
    "draft.vocabulary=120",
    "data.num_prompts=40",
    "data.max_new_tokens=12",
    f"train.max_steps={STEPS}",
    "train.eval_every=1",
    f"train.keep_checkpoints={STEPS}",
    "train.batch_tokens=128",
    "train.row_tokens=128",
    "train.dtype=float32",
    "train.schedule=constant",
    "target.device=cpu",
    "evaluation.measure_cost=false",
)
ON_POLICY = ("data=draft", "data.refresh_prompts=40", "loss.select_fraction=0.5")
LAUNCHERS = [
    "ddp",
    "fsdp",
    *(
        pytest.param(
            kind,
            marks=pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed"),
        )
        for kind in ("deepspeed_zero2", "deepspeed_zero3")
    ),
]
TRACKER = "wandb" if importlib.util.find_spec("wandb") is not None else "none"
LOGGED = ("train/loss", "train/alpha", "train/outside", "train/grad_norm", "train/lr", "train/bad_steps", "tokens")

# Meets NaN in one micro-batch of step 2, on the last process only.
RANK_WITH_A_BAD_STEP = f"""
import os, sys
from distillspec.commands import train_rank
from distillspec.sampling import NonFiniteLogits
from distillspec.training import module

plain, calls = module.chunked_loss, []

def chunked_loss(*args, **kwargs):
    calls.append(1)
    if os.environ["RANK"] == "{WORLD - 1}" and len(calls) == {(BAD_STEP - 1) * ACCUMULATE + 1}:
        raise NonFiniteLogits("draft logits: NaN at position 3")
    return plain(*args, **kwargs)

module.chunked_loss = chunked_loss
train_rank.leave(train_rank.main())
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder with its data and untrained draft, and the config it was made by."""

    folder: Path
    config: TrainCommand
    target: LanguageModel

    def launch(self, command: list[str] | None = None) -> None:
        open_run(self.folder, self.config)
        rank = [sys.executable, "-P", "-m", "distillspec.commands.train_rank"]
        launch(self.config.launcher, "cpu", [*(command or rank), str(self.folder)], self.folder)

    def train_alone(self) -> None:
        open_run(self.folder, self.config)
        AcceleratorState._reset_state()
        PartialState._reset_state()
        train(self.config, self.folder, self.target, *prepare(self.config, self.folder, self.target))

    def spread(self, folder: Path, kind: str, **changes: Any) -> Run:
        """The same run from its beginning, in `WORLD` processes and another folder."""
        folder.mkdir(parents=True)
        for part in ("data", "initial"):
            shutil.copytree(self.folder / part, folder / part)
        settings = dataclasses.replace(self.config.train, accumulate=ACCUMULATE)
        changed = {"train": settings, "launcher": LauncherConfig(kind, WORLD), **changes}
        return Run(folder, dataclasses.replace(self.config, **changed), self.target)

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def steps(self, after: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if "train/lr" in line and line["step"] > after]

    def rank_records(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / "ranks" / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


def make_run(folder: Path, *words: str) -> Run:
    config = compose("train", [*WORDS, f"train.accumulate={WORLD * ACCUMULATE}", *words])
    target = load_target(config.target)
    _, samples, held_out = prepare(config, folder, target)
    save_draft(prepare_draft(config.draft, target, lambda: samples or held_out), folder / "initial", target)
    # One epoch, in which several processes and one meet the same batches.
    assert on_policy(config) or len(samples) >= STEPS * WORLD * ACCUMULATE
    return Run(folder, config, target)


def on_policy(config: TrainCommand) -> bool:
    return config.data.source != "teacher"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, with a step of which one micro-batch is bad."""
    run = make_run(tmp_path_factory.mktemp("alone"))
    plain, calls = module.chunked_loss, []

    def chunked_loss(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == (BAD_STEP - 1) * WORLD * ACCUMULATE + 1:
            raise NonFiniteLogits("draft logits: NaN at position 3")
        return plain(*args, **kwargs)

    with mock.patch.object(module, "chunked_loss", chunked_loss):
        run.train_alone()
    assert [step["train/bad_steps"] for step in run.steps()] == [0, 1, 1, 1]
    return run


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_several_processes_learn_what_one_learns(alone: Run, tmp_path: Path, kind: str) -> None:
    run = alone.spread(tmp_path / "run", kind)
    script = tmp_path / "rank.py"
    script.write_text(RANK_WITH_A_BAD_STEP)
    run.launch([sys.executable, str(script)])
    assert_same_steps(run, alone)
    assert_same_state(run, alone)
    best = load_draft(run.folder / "best", run.target)
    ours, theirs = best.model.state_dict(), load_draft(alone.folder / "best", run.target).model.state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-4) for name, value in ours.items())
    assert_really_spread(run.rank_records(), kind)


@pytest.mark.parametrize("kind", LAUNCHERS[1:])
def test_a_run_goes_on_in_several_processes_from_the_checkpoint_of_one(alone: Run, tmp_path: Path, kind: str) -> None:
    run = alone.spread(tmp_path / "run", kind, resume=str(tmp_path / "run"))
    half = STEPS // 2
    checkpoint = Path("checkpoints") / f"step-{half:08d}"
    shutil.copytree(alone.folder / checkpoint, run.folder / checkpoint)
    edit_feed_position(run.folder / checkpoint, half * ACCUMULATE)
    run.launch()
    assert [step["step"] for step in run.steps()] == list(range(half + 1, STEPS + 1))
    assert_same_steps(run, alone, after=half)
    assert_same_state(run, alone)


@pytest.mark.parametrize("kind", LAUNCHERS[1::2])
def test_every_process_learns_from_the_same_fresh_samples(tmp_path: Path, alone: Run, kind: str) -> None:
    """On policy, and with token selection, which asks the sharded draft for its losses before the step."""
    reference = f"loss.reference={alone.folder / 'best'}"
    one = make_run(tmp_path / "one", *ON_POLICY, reference, "train.max_steps=2", "data.refresh_steps=2")
    one.train_alone()
    run = one.spread(tmp_path / "run", kind)
    run.launch()
    assert_same_steps(run, one)
    assert 0 < one.steps()[0]["train/loss"] < math.inf


def test_an_interrupted_launch_resumes_where_it_stopped(alone: Run, tmp_path: Path) -> None:
    """By the command line, whose parent process is the one that the signal reaches; W&B's run goes on too."""
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
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].endswith(f"continue with: distill train resume={run.folder}")
    stopped = load_newest(run.folder / "checkpoints")[0].progress.step
    assert stopped == run.steps()[-1]["step"] >= 3
    assert_one_tracked_run(run.folder, sittings=1)
    with distill(f"resume={run.folder}", f"train.max_steps={stopped + 2}") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
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
    # The other process is at its batch, or waits for gradients; it must not outlive this one.
    script.write_text(
        "import os, sys\nfrom distillspec.commands import train_rank\nfrom distillspec.training import feed\n"
        "plain = feed.SampleFeed.take\n"
        "def take(self):\n"
        "    open(sys.argv[1] + f'/pid-{self.rank}', 'w').write(str(os.getpid()))\n"
        "    if self.rank == 1 and self.next_batch == 3:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return plain(self)\n"
        "feed.SampleFeed.take = take\ntrain_rank.leave(train_rank.main())\n"
    )
    with pytest.raises(RunError, match=r"process 1 of 2 was ended by SIGKILL.*see .*rank-1\.log") as failed:
        run.launch([sys.executable, str(script)])
    assert "\n" not in str(failed.value)
    died = (run.folder / "pid-1").stat().st_mtime
    assert time.time() - died < 10
    for rank in range(WORLD):
        assert not is_alive(int((run.folder / f"pid-{rank}").read_text()))


def assert_same_steps(ours: Run, theirs: Run, after: int = 0) -> None:
    mine, other = ours.steps(after), theirs.steps(after)
    assert len(mine) == len(other) > 0
    for step, expected in zip(mine, other, strict=True):
        known = [key for key in LOGGED if key in expected]  # a bad step has no loss
        assert [key for key in LOGGED if key in step] == known
        assert [step[key] for key in known] == pytest.approx([expected[key] for key in known], rel=2e-4)


def assert_same_state(ours: Run, theirs: Run) -> None:
    """The checkpoint of any launch is that of one process: whole tensors under the same names."""
    mine = load_newest(ours.folder / "checkpoints")[0].strategy
    other = load_newest(theirs.folder / "checkpoints")[0].strategy
    assert mine["model"].keys() == other["model"].keys()
    for name, value in other["model"].items():
        torch.testing.assert_close(mine["model"][name], value, atol=1e-4, rtol=1e-3)
    assert mine["optimizer"].keys() == other["optimizer"].keys()
    for name, moments in other["optimizer"].items():
        assert mine["optimizer"][name]["step"] == moments["step"]
        torch.testing.assert_close(mine["optimizer"][name]["exp_avg"], moments["exp_avg"], atol=1e-4, rtol=1e-2)


def assert_really_spread(records: list[dict[str, Any]], kind: str) -> None:
    assert [(r["rank"], r["world"], r["backend"]) for r in records] == [(rank, WORLD, "gloo") for rank in range(WORLD)]
    weights, held = records[0]["weights_whole"], [r["weights_held"] for r in records]
    moments, parts = records[0]["optimizer_whole"], [r["optimizer_held"] for r in records]
    if kind in ("fsdp", "deepspeed_zero3"):
        assert records[0]["weights"] == ("DTensor" if kind == "fsdp" else "Parameter with ds_id")
        assert weights <= sum(held) < 1.05 * weights  # ZeRO pads
        assert max(held) < 0.6 * weights
    else:
        assert held == [weights] * WORLD
    if kind == "ddp":
        assert parts == [moments] * WORLD
    else:
        assert moments <= sum(parts) < 1.05 * moments
        assert max(parts) < 0.6 * moments


def assert_one_tracked_run(folder: Path, sittings: int) -> None:
    """One process of each launch wrote to W&B, offline, and always to the same run."""
    if TRACKER == "none":
        return
    name = (folder / "wandb_run_id").read_text().strip()
    records = sorted(path.name for path in (folder / "wandb").glob("offline-run-*/*.wandb"))
    assert records == [f"run-{name}.wandb"] * sittings


def edit_feed_position(checkpoint: Path, next_batch: int) -> None:
    """Batches are counted by process; one process has taken twice as many as each of two."""
    record = json.loads((checkpoint / "state.json").read_text())
    record["feed"]["next_batch"] = next_batch
    (checkpoint / "state.json").write_text(json.dumps(record))
    digests = json.loads((checkpoint / "sha256.json").read_text())
    digests["state.json"] = sha256_of(checkpoint / "state.json")
    (checkpoint / "sha256.json").write_text(json.dumps(digests))


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


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 60) -> None:
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
