"""Files that every command writes to its run folder."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distillspec.config import COMMANDS
from distillspec.files import write_json, write_text
from distillspec.provenance import provenance

CONFIG = "config.yaml"


def open_run(folder: Path, config: Any) -> None:
    """Write `config.yaml` and `provenance.json`."""
    write_text(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.structured(config)))
    command = next(name for name, schema in COMMANDS.items() if isinstance(config, schema))
    # Hydra reads sys.argv, so cli.py has taken the command out of it.
    write_json(folder / "provenance.json", provenance(["distill", command, *sys.argv[1:]], getattr(config, "seed", 0)))


def close_run(folder: Path, command: str, summary: dict[str, Any]) -> None:
    """Write the run's figures to `summary.json`."""
    write_json(folder / "summary.json", {**summary, "command": command})


def plain(value: Any) -> Any:
    """Return a dataclass as plain dictionaries."""
    return dataclasses.asdict(value)
