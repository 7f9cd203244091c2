"""Several processes learn what one process learns from the same batches, however the module is spread."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.files import sha256_of
from distillspec.models import load_draft
from distillspec.training.checkpoint import load_newest

from .distributed_runs import ACCUMULATE, BAD_STEP, STEPS, WORLD, Run, make_run

pytestmark = pytest.mark.dist

ON_POLICY = ("data=draft", "data.refresh_prompts=40", "loss.select_fraction=0.5")
NEEDS_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
LAUNCHERS = [
    "ddp",
    "fsdp",
    pytest.param("deepspeed_zero2", marks=NEEDS_DEEPSPEED),
    pytest.param("deepspeed_zero3", marks=NEEDS_DEEPSPEED),
]
# The settings of drafts that read the target's states, and each with a launcher that shards it.
READS = {
    "eagle": ("draft=eagle",),
    "block": ("draft=block",),
    "hydra": ("draft=medusa", "draft.sequential=true"),
}
READERS = [
    ("eagle", "fsdp"),
    ("block", "fsdp"),
    pytest.param("hydra", "deepspeed_zero3", marks=NEEDS_DEEPSPEED),
]
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


@pytest.mark.long
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


@pytest.mark.parametrize("kind", LAUNCHERS[1::2])
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


@pytest.mark.parametrize(("draft", "kind"), READERS)
def test_drafts_that_read_states_learn_alike_in_several_processes(tmp_path: Path, draft: str, kind: str) -> None:
    """Their parts are called through the adapter, not by the wrapped module itself."""
    one = make_run(tmp_path / "one", *READS[draft], "train.max_steps=2", "train.eval_every=2")
    one.train_alone()
    run = one.spread(tmp_path / "run", kind)
    run.launch()
    assert_same_steps(run, one)
    assert_same_state(run, one)


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
