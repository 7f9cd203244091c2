"""Training runs that drafts come from, for their held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from distillspec.config import DataConfig
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.errors import ConfigError


@dataclass(frozen=True)
class OwnRun:
    """A training run that still exists, with its data."""

    folder: Path
    data: DataFolder
    max_new_tokens: int


def find_runs(drafts: Iterable[Path]) -> list[OwnRun]:
    """Return the runs that the drafts lie in, each once. A draft without a run beside it has none."""
    found = {}
    for draft in drafts:
        if (run := _run_of(draft)) is not None:
            found[run.folder.resolve()] = run
    return list(found.values())


def typed_settings(folder: Path) -> frozenset[str]:
    """Return the names of the settings typed for the run in `folder`, those equal to their defaults included."""
    file = folder / ".hydra" / "overrides.yaml"
    words = [str(word) for word in OmegaConf.load(file)] if file.is_file() else []
    return frozenset(word.lstrip("+").partition("=")[0] for word in words)


def data_of(config: DataConfig, runs: list[OwnRun], typed: frozenset[str]) -> DataConfig:
    """Return the data settings with the first run's held-out prompts and answer length, unless others were typed."""
    default = DataConfig()
    own_prompts = "data.prompts" not in typed and config.prompts == default.prompts
    if not runs or config.cache is not None or not own_prompts:
        return config
    own_length = "data.max_new_tokens" not in typed and config.max_new_tokens == default.max_new_tokens
    length = runs[0].max_new_tokens if own_length else config.max_new_tokens
    return replace(config, cache=str(runs[0].data.root), max_new_tokens=length)


def _run_of(draft: Path) -> OwnRun | None:
    """Return the run around `draft/` or `best/`, None if no training run left it, or its data is gone."""
    file = draft.parent / "config.yaml"
    if not file.is_file():
        return None
    stored = OmegaConf.load(file)
    if not isinstance(stored, DictConfig) or "train" not in stored or "data" not in stored:
        return None
    try:
        data = find_data_folder(stored.data.get("cache") or str(draft.parent))
    except ConfigError:
        return None  # moved or removed
    return OwnRun(draft.parent, data, int(stored.data.max_new_tokens))
