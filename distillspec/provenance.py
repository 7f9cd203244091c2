"""Provenance of a result: command, code, packages and hardware, but no host or user name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from distillspec import __version__

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "hydra-core",
    "safetensors",
    "numpy",
    "gguf",
    "deepspeed",
    "wandb",
)
T = TypeVar("T")


def provenance(argv: Sequence[str], seed: int) -> dict[str, Any]:
    """Return the content of `provenance.json`. Never raises: a fact that cannot be found is None.

    `git_commit` and `git_dirty` are those of the checkout this package runs from (None when installed from a
    wheel). No host or user name is recorded.
    """
    return {
        "argv": [str(argument) for argument in argv],
        "seed": seed,
        "distillspec": __version__,
        "git_commit": _quietly(_git_commit),
        "git_dirty": _quietly(_git_dirty),
        "packages": {name: version for name in PACKAGES if (version := _quietly(_version, name)) is not None},
        "python": platform.python_version(),
        "os": _quietly(lambda: f"{platform.system()} {platform.release()} {platform.machine()}"),
        "hardware": hardware(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware() -> dict[str, Any]:
    """Return processor model, cores this process may use, memory in bytes, and GPU names."""
    return {
        "cpu": _quietly(_cpu_model),
        "cores": _quietly(usable_cores),
        "memory_bytes": _quietly(_memory_bytes),
        "gpus": _quietly(_gpu_names) or [],
        "torch_threads": _quietly(torch.get_num_threads),
    }


def _quietly(find: Callable[..., T], *arguments: Any) -> T | None:
    """Return the result of `find`, or None if it fails: provenance must never stop a run."""
    try:
        return find(*arguments)
    except Exception:
        return None


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _git_commit() -> str | None:
    return _git("rev-parse", "HEAD").strip() or None if _is_checkout() else None


def _git_dirty() -> bool | None:
    return bool(_git("status", "--porcelain").strip()) if _is_checkout() else None


def _is_checkout() -> bool:
    # A wheel inside a .venv of some other repository would otherwise report that repository's commit.
    return (Path(_git("rev-parse", "--show-toplevel").strip()) / "distillspec" / "provenance.py").is_file()


def _git(*arguments: str) -> str:
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.is_file() and (match := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        return match[1].strip()
    return platform.processor() or None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
