"""States of the target that are stored with the text of a run."""

from __future__ import annotations

from dataclasses import replace

from distillspec.config import DataConfig, DraftConfig, TrainCommand
from distillspec.models import LanguageModel, read_metadata
from distillspec.models.checkpoint import draft_folder
from distillspec.models.draft import state_ids_of


def recording(config: TrainCommand, target: LanguageModel) -> DataConfig:
    """Return the data settings. The target's text is stored with the states that a draft reads."""
    data, ids = config.data, _states_read(config.draft, target)
    records = data.source == "teacher" and data.generator == "slots"
    return replace(data, state_ids=ids) if ids and records and data.state_ids is None else data


def _states_read(config: DraftConfig, target: LanguageModel) -> list[int]:
    """Return the states that a new draft reads, or one that goes on from a folder. None of a target that trains too."""
    if config.records_states:
        return list(state_ids_of(config, target))
    folder = None if config.path is None or config.train_target else draft_folder(config.path)
    reads = None if folder is None else read_metadata(folder).get("reads")
    return list(reads["state_ids"]) if reads else []
