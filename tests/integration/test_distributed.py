"""Several processes learn what one process learns from the same batches, however the module is spread."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.files import sha256_of
from distillspec.models import load_draft
from distillspec.training.checkpoint import load_newest

from .distributed_runs import ACCUMULATE, STEPS, WORLD, Run, make_run

pytestmark = pytest.mark.dist

ON_POLICY = ("data=draft", "data.refresh_prompts=40", "loss.select_fraction=0.5")
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
LAUNCHERS = [
    "ddp",
    "fsdp",
    pytest.param("deepspeed_zero2", marks=NEEDS_DEEPSPEED),
    pytest.param("deepspeed_zero3", marks=NEEDS_DEEPSPEED),
]
SHARDED = ("fsdp", "deepspeed_zero3")
# The settings of drafts that read the target's states, and each with a launcher that shards it.
READS = {
    "eagle": ("draft=eagle", "draft.layers=null"),  # one: its keys are computed alone
    "block": ("draft=block", "draft.layers=null"),
    "features": ("draft=pruned", "draft.features=true"),
    "hydra": ("draft=medusa", "draft.sequential=true"),
}
READERS = {"eagle": "fsdp", "block": "fsdp", "features": "fsdp", "hydra": "deepspeed_zero3"}
HALF = STEPS // 2
LOGGED = ("train/loss", "train/alpha", "train/outside", "train/grad_norm", "train/lr", "train/bad_steps", "tokens")


@dataclass
class Launched:
    """What the processes of one launch trained, beside what one process did."""

    whole: Run
    resumed: Run | None
    fresh: Run | None
    reading: dict[str, Run]


@pytest.fixture(scope="module")
def one_fresh(alone: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process on policy, and with token selection, which asks the sharded draft for its losses before the step."""
    reference = f"loss.reference={alone.folder / 'best'}"
    folder = tmp_path_factory.mktemp("fresh") / "one"
    one = make_run(folder, *ON_POLICY, reference, "train.max_steps=2", "data.refresh_steps=2")
    one.train_alone()
    return one


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One process for each draft that reads states."""
    folder = tmp_path_factory.mktemp("reading")
    runs = {
        name: make_run(folder / name, *words, "train.max_steps=2", "train.eval_every=2")
        for name, words in READS.items()
    }
    for run in runs.values():
        run.train_alone()
    return runs


@pytest.fixture(scope="module")
def launched(
    alone: Run, one_fresh: Run, reading: dict[str, Run], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Launched]:
    """`launched("fsdp")`: one launch of a kind trains all that the tests look at."""

    @cache
    def launch(kind: str) -> Launched:
        folder = tmp_path_factory.mktemp(kind)
        found = Launched(alone.spread(folder / "whole", kind), None, None, {})
        if kind in SHARDED:
            found.resumed = at_half(alone, folder / "resumed", kind)
            found.fresh = one_fresh.spread(folder / "fresh", kind)
            readers = {name: run for name, run in reading.items() if READERS[name] == kind}
            found.reading = {name: run.spread(folder / name, kind) for name, run in readers.items()}
        others = [run for run in (found.resumed, found.fresh, *found.reading.values()) if run is not None]
        found.whole.launch_with(others, folder / "rank.py")
        return found

    return launch


def at_half(alone: Run, folder: Path, kind: str) -> Run:
    """Return a run that goes on from the checkpoint of one process."""
    run = alone.spread(folder, kind, resume=str(folder))
    checkpoint = Path("checkpoints") / f"step-{HALF:08d}"
    shutil.copytree(alone.folder / checkpoint, folder / checkpoint)
    edit_feed_position(folder / checkpoint, HALF * ACCUMULATE)
    return run


@pytest.mark.long
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_several_processes_learn_what_one_learns(launched: Callable[[str], Launched], alone: Run, kind: str) -> None:
    run = launched(kind).whole
    assert_same_steps(run, alone)
    assert_same_state(run, alone)
    best = load_draft(run.folder / "best", run.target)
    ours, theirs = best.model.state_dict(), load_draft(alone.folder / "best", run.target).model.state_dict()
    # Their folders have 16 bits a weight: numbers that are alike may round to neighbours.
    assert all(torch.allclose(value, theirs[name], atol=1e-4, rtol=2**-7) for name, value in ours.items())
    assert_really_spread(run.rank_records(), kind)


@pytest.mark.parametrize("kind", LAUNCHERS[1::2])
def test_a_run_goes_on_in_several_processes_from_the_checkpoint_of_one(
    launched: Callable[[str], Launched], alone: Run, kind: str
) -> None:
    run = launched(kind).resumed
    assert run is not None
    assert [step["step"] for step in run.steps()] == list(range(HALF + 1, STEPS + 1))
    assert_same_steps(run, alone, after=HALF)
    assert_same_state(run, alone)


@pytest.mark.parametrize("kind", LAUNCHERS[1::2])
def test_every_process_learns_from_the_same_fresh_samples(
    launched: Callable[[str], Launched], one_fresh: Run, kind: str
) -> None:
    run = launched(kind).fresh
    assert run is not None
    assert_same_steps(run, one_fresh)
    assert 0 < one_fresh.steps()[0]["train/loss"] < math.inf


@pytest.mark.parametrize(
    "draft",
    [pytest.param(draft, marks=[NEEDS_DEEPSPEED] * kind.startswith("deepspeed")) for draft, kind in READERS.items()],
)
def test_drafts_that_read_states_learn_alike_in_several_processes(
    launched: Callable[[str], Launched], reading: dict[str, Run], draft: str
) -> None:
    """Their parts are called through the adapter, not by the wrapped module itself."""
    run = launched(READERS[draft]).reading[draft]
    assert_same_steps(run, reading[draft])
    assert_same_state(run, reading[draft])


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


def edit_feed_position(checkpoint: Path, next_batch: int) -> None:
    """Set the batch to continue from. Batches are counted by process: one process took twice as many as each of two."""
    record = json.loads((checkpoint / "state.json").read_text())
    record["feed"]["next_batch"] = next_batch
    (checkpoint / "state.json").write_text(json.dumps(record))
    digests = json.loads((checkpoint / "sha256.json").read_text())
    digests["state.json"] = sha256_of(checkpoint / "state.json")
    (checkpoint / "sha256.json").write_text(json.dumps(digests))
