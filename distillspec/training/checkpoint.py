"""Training checkpoints: the whole state of a bit-exact resume, checked by hash before it is trusted."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distillspec.data.shards import ShardWriter, read_samples
from distillspec.errors import RunError
from distillspec.files import verify_folder, write_folder
from distillspec.training.schedule import Progress
from distillspec.types import Sample


@dataclass(frozen=True)
class Generators:
    """States of torch's global generators."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None = None  # the current device's, None without one and in older checkpoints

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Return the current states of the generators that work on `device` draws from."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@dataclass(frozen=True)
class Checkpoint:
    """State of a run between two steps."""

    progress: Progress
    strategy: dict[str, Any]  # weights and optimizer
    feed: dict[str, Any]
    rng: Generators
    best: dict[str, Any] | None
    bad_steps: int
    evaluated_step: int | None
    fresh_samples: list[Sample] | None  # on-policy runs: what the current draft wrote


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `step-XXXXXXXX` under `folder` and drop all but the newest `keep`.

    Those of later steps go too: a resumed run has passed over them, since they are damaged.
    """
    path = folder / f"step-{checkpoint.progress.step:08d}"
    write_folder(path, lambda temporary: _write(checkpoint, temporary))
    kept = [other for other in _folders(folder) if other <= path][-keep:]
    for other in _folders(folder):
        if other not in kept:
            shutil.rmtree(other, ignore_errors=True)
    return path


def has_checkpoint(folder: Path) -> bool:
    """Return True if a run has saved its state in `folder`. A save that was cut off does not count."""
    return bool(_folders(folder))


def load_newest(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Return the newest checkpoint whose files match their hashes, and the problems of newer ones.

    Raises:
        RunError: there is none.
    """
    problems: list[str] = []
    for path in reversed(_folders(folder)):
        problem = verify_folder(path)
        if problem is None:
            return _read(path), problems
        problems.append(problem)
    detail = f": {'; '.join(problems)}" if problems else ""
    raise RunError(f"{folder} holds no usable checkpoint{detail}; start the run anew")


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    # Through a stream of ours: given a path, torch reports a full disk as an internal error.
    with (folder / "state.pt").open("wb") as stream:
        torch.save(
            {"strategy": checkpoint.strategy, "rng": checkpoint.rng.cpu, "cuda_rng": checkpoint.rng.cuda}, stream
        )
    record = {
        "progress": asdict(checkpoint.progress),
        "feed": checkpoint.feed,
        "best": checkpoint.best,
        "bad_steps": checkpoint.bad_steps,
        "evaluated_step": checkpoint.evaluated_step,
    }
    (folder / "state.json").write_text(json.dumps(record, indent=2) + "\n")
    if checkpoint.fresh_samples is not None:
        writer = ShardWriter(folder / "fresh", {}, shard_sequences=len(checkpoint.fresh_samples) + 1)
        for sample in checkpoint.fresh_samples:
            writer.add(sample)
        writer.flush(complete=True)


def _read(folder: Path) -> Checkpoint:
    tensors = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    record = json.loads((folder / "state.json").read_text())
    fresh = folder / "fresh"
    return Checkpoint(
        progress=Progress(**record["progress"]),
        strategy=tensors["strategy"],
        feed=record["feed"],
        rng=Generators(tensors["rng"], tensors.get("cuda_rng")),
        best=record["best"],
        bad_steps=record["bad_steps"],
        evaluated_step=record["evaluated_step"],
        fresh_samples=read_samples(fresh) if fresh.is_dir() else None,
    )
