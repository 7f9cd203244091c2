"""Logs of a run's figures: `metrics.jsonl` always, and Accelerate's trackers if configured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from distillspec.config import TrackerConfig
from distillspec.files import clear_disk_errors, read_lines, write_text


class MetricsLog:
    """Log file of one JSON object a line.

    Args:
        most_bytes: past this size the file is renamed to `NAME.1.jsonl`, replacing an older one, and a new file starts.
            None: it grows.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path, self.most_bytes = path, most_bytes

    def rewind(self, step: int) -> None:
        """Drop the lines past `step`, since a resumed run writes them again."""
        if self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines() if _step_of(line) <= step]
            write_text(self.path, "".join(line + "\n" for line in lines))

    def add(self, record: dict[str, Any]) -> None:
        with clear_disk_errors(self.path):
            if self.most_bytes is not None and self.path.is_file() and self.path.stat().st_size >= self.most_bytes:
                os.replace(self.path, self.path.with_suffix(f".1{self.path.suffix}"))
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")


class Tracker:
    """`metrics.jsonl` and an optional Accelerate tracker, behind one `log`."""

    def __init__(self, accelerator: Accelerator, config: TrackerConfig, run: Path) -> None:
        self.accelerator = accelerator
        self.metrics = MetricsLog(run / "metrics.jsonl") if accelerator.is_main_process else None
        self.external = config.kind != "none"

    def rewind(self, step: int) -> None:
        """Drop what was logged past `step`, before a resumed run continues from there."""
        if self.metrics is not None:
            self.metrics.rewind(step)

    def start(self, config: TrackerConfig, run: Path, settings: dict[str, Any]) -> None:
        """Open the external tracker. W&B goes offline without a key, and continues the run it had."""
        if not self.external:
            return
        options: dict[str, Any] = {}
        if config.kind == "wandb":
            if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or _has_netrc_key()):
                os.environ["WANDB_MODE"] = "offline"
            options["wandb"] = {
                "id": _run_id(run),
                "resume": "allow",
                "name": config.name or run.name,
                "tags": list(config.tags),
                "dir": str(run),
            }
        if config.kind == "tensorboard":
            settings = flat(settings)  # its table of settings takes plain values only
        self.accelerator.project_configuration.set_directories(str(run))
        self.accelerator.log_with = filter_trackers(config.kind, str(run))
        self.accelerator.init_trackers(config.project, config=settings, init_kwargs=options)

    def log(self, record: dict[str, Any]) -> None:
        """Log a record of step, tokens, seconds and named scalars."""
        if self.metrics is not None:
            self.metrics.add(record)
        if self.external:
            scalars = {k: v for k, v in record.items() if k != "step"}
            self.accelerator.log(scalars, step=int(record["step"]))

    def close(self) -> None:
        if not self.external:
            return
        # Not `end_training`: it also destroys the process group, holding the lock that gloo's threads may be waiting
        # for to let go of the last tensors (torch 2.13), and processes end without it.
        for tracker in self.accelerator.trackers:
            tracker.finish()


def last_values(run: Path) -> dict[str, float]:
    """Return the newest `train/…` values of a run's `metrics.jsonl`, empty before its first step."""
    steps = reversed(read_lines(run / "metrics.jsonl"))
    newest: dict[str, float] = next((values for values in steps if "train/lr" in values), {})
    return {name: value for name, value in newest.items() if name.startswith("train/")}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names, with all values but numbers and text as text."""
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            plain |= flat(value, f"{prefix}{name}.")
        else:
            plain[f"{prefix}{name}"] = value if isinstance(value, (int, float, str)) else str(value)
    return plain


def _run_id(run: Path) -> str:
    """Return the W&B id of a run folder, made once, so that a resumed run is the same run."""
    path = run / "wandb_run_id"
    if not path.is_file():
        write_text(path, os.urandom(8).hex() + "\n")
    return path.read_text().strip()


def _has_netrc_key() -> bool:
    path = Path.home() / ".netrc"
    return path.is_file() and "wandb" in path.read_text(errors="ignore")


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 1 << 62  # a line cut by a crash is dropped with the ones past the checkpoint
