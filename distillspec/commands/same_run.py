"""A training run that goes on in its folder: what it holds is kept, so other settings for that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from distillspec.commands.run_folder import CONFIG
from distillspec.config import TrainCommand
from distillspec.config.removed import present_name
from distillspec.data.folder import DataFolder
from distillspec.data.shards import is_whole
from distillspec.errors import ConfigError
from distillspec.training.checkpoint import has_checkpoint
from distillspec.training.tracking import flat

BEFORE = "before.json"  # figures of the untrained draft
TEXT = ("target.path", "seed", "sampling.", "data.")  # settings of the text
# Settings of the untrained draft, and of what is compared.
DRAFT = ("draft.", "train.eval_max_prompts", "evaluation.speculation_length")
PATHS = ("target.path", "data.prompts", "data.cache", "draft.path")  # what they name may have moved since
# Settings of how text is written, not of what, and of text that is still to be written.
FREE = (
    *("data.generator", "data.batch_slots", "data.shard_sequences"),
    *("data.refresh_steps", "data.refresh_keep", "data.refresh_prompts"),
)


def check_same_run(config: TrainCommand, folder: Path) -> None:
    """Refuse to go on in a folder that holds the text or the draft of other settings, before anything is written.

    Raises:
        ConfigError: names the setting, or the run that is there.
    """
    if not (folder / CONFIG).is_file():
        return
    if config.resume is None and has_checkpoint(folder / "checkpoints"):
        raise ConfigError(f"{folder} holds a run already; continue it with resume={folder}, or name another folder")
    before, now = _values(OmegaConf.load(folder / CONFIG)), _values(OmegaConf.structured(config))
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name] and _is_settled(name, folder) and not _has_moved(name, before[name], now[name]):
            raise ConfigError(
                f"{name}={now[name]}: {folder} was made with {before[name]}; begin a new run for another value"
            )


def _is_settled(name: str, folder: Path) -> bool:
    """Return True for a setting of what the folder holds already."""
    text, began = DataFolder(folder / "data"), (folder / BEFORE).is_file()
    if name == "data.max_minutes":
        return began or is_whole(text.samples)
    settled = [*(TEXT if began or text.has_prompts else ()), *(DRAFT if began else ())]
    return name not in FREE and any(name == key or (key.endswith(".") and name.startswith(key)) for key in settled)


def _has_moved(name: str, before: str, now: str) -> bool:
    """Return True for a path in place of one that is not there any more, or of the same file."""
    if name not in PATHS or "None" in (before, now):
        return False
    old, new = Path(before).expanduser(), Path(now).expanduser()
    return not old.exists() or (new.exists() and old.samefile(new))


def _values(settings: Any) -> dict[str, Any]:
    """Return values by the dotted names that settings have now."""
    values = flat(cast(dict[str, Any], OmegaConf.to_container(settings)))
    return {present_name("train", name): value for name, value in values.items()}
