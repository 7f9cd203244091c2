"""Drafts that an update starts from: the last usable candidate, or the version in service."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, load_draft, read_metadata
from distillspec.models.checkpoint import TargetRecord, embeddings_of, recorded_target
from distillspec.models.draft_head import HeadRows, can_renew, renew_head
from distillspec.models.vocabulary import lasting_ids
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.examples import TrainingExample
from distillspec.serving.online.training.loaded_target import LoadedTarget
from distillspec.serving.online.training.vocabulary import needed_counts, renewed_ids
from distillspec.training.state_store import StateStore

log = logging.getLogger(__name__)


class BaseDrafts:
    """Chooses and loads the versions that training starts from.

    Args:
        replay: the log whose target and tokenizer they must have.
        target: which is loaded for drafts that read its states or embeddings.
    """

    def __init__(self, registry: VersionRegistry, replay: ReplayLog, target: LoadedTarget) -> None:
        self._registry = registry
        self._replay = replay
        self._target = target

    def current(self) -> Version:
        """Return the version in service.

        Raises:
            ConfigError: no version is promoted.
        """
        current = self._registry.current()
        if current is None:
            raise ConfigError(
                f"no draft is promoted in {self._registry.folder}; start the server with its draft first, or "
                "distill versions action=promote"
            )
        return current

    def parent(self, working: str | None) -> Version:
        """Return the version to train on: `working` (the last candidate) if it is usable, otherwise `current`.

        Usable: it descends from the version in service, and no step in between was refused or rolled back. So gains too
        small for the gate to see add up.
        """
        current = self.current()
        if working is None:
            return current
        version = self._registry.get(working)
        usable = self._descends(version, current) and self._registry.problem_of(version) is None
        return version if usable else current

    def target(self) -> TargetRecord:
        """Return what the version in service records of its target."""
        return recorded_target(self.current().path)

    def made_for(self) -> TargetRecord | LanguageModel:
        """Return the target to save a version for: loaded if its embeddings were read, else its record."""
        return self._target.known or self.target()

    def load(self, version: Version) -> LanguageModel:
        """Load a version for training, without its stop head: that was trained for weights that now change.

        Raises:
            RunError: its folder is damaged. ConfigError: it has another tokenizer or target than the log.
        """
        if problem := self._registry.problem_of(version):
            raise RunError(f"{version.name} cannot be trained on: {problem}")
        draft = load_draft(version.path, self._needed(read_metadata(version.path)))
        key, folder = self._replay.key, self._replay.folder
        if draft.identity.tokenizer_hash != key.tokenizer_hash:
            raise ConfigError(
                f"the draft {version.name} and the log in {folder} have different tokenizers "
                f"({draft.identity.tokenizer_hash}, {key.tokenizer_hash}); use another online.folder"
            )
        if self.target().identity.weights_hash not in ("", key.weights_hash):
            raise ConfigError(
                f"the draft {version.name} was made for another target than the log in {folder}; use another "
                "online.folder"
            )
        draft.model.to(self._target.device)
        if draft.stop_head is not None:
            log.info("%s: an update leaves out what train-stop taught it of its own weights", version.name)
        return replace(draft, stop_head=None)

    def renewed(
        self, draft: LanguageModel, examples: Sequence[TrainingExample], most: int | None
    ) -> tuple[LanguageModel, HeadRows | None]:
        """Return the draft with the vocabulary that the text of an update needs, and where its head's rows were.

        None: the head stays, since it is whole, lacks nothing, or cannot read the target's rows.
        """
        if draft.kept_ids is None or most is None:
            return draft, None
        counts, size = needed_counts(examples, draft.identity.vocab_size), draft.identity.vocab_size
        ids = renewed_ids(draft.kept_ids, counts, most, lasting_ids(draft.tokenizer, draft.stop_ids, size))
        if torch.equal(ids, draft.kept_ids) or not can_renew(draft, target := self._target.embeddings()):
            return draft, None
        return renew_head(draft, ids, target), HeadRows.between(draft.kept_ids, ids)

    def states_for(self, draft: LanguageModel) -> StateStore | None:
        """Return a store of the states that a draft reads, None for a draft that reads tokens alone."""
        return StateStore(self.loaded_target(), draft.state_ids) if draft.state_ids else None

    def loaded_target(self) -> LanguageModel:
        """Return the target. See `LoadedTarget.whole`."""
        return self._target.whole()

    def _needed(self, record: dict[str, Any]) -> LanguageModel | None:
        """Return what a draft with this record reads: the target, its embeddings alone, or nothing of it."""
        if "reads" in record:
            return self._target.whole()
        return self._target.embeddings() if embeddings_of(record) == "target" else None

    def _descends(self, version: Version, current: Version) -> bool:
        """Return True if `version` descends from `current` with no refused or rolled-back version in between."""
        line = [version, *self._registry.lineage(version)]
        since = list(takewhile(lambda ancestor: ancestor.name != current.name, line))
        return len(since) < len(line) and all(ancestor.status in ("candidate", "inconclusive") for ancestor in since)
