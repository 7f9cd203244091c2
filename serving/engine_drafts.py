"""Drafts of an engine: loaded, swapped and unloaded while requests run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.checkpoint import check_target
from distillspec.models.features import check_feature_ids
from distillspec.models.memory import return_freed_memory
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.hardware_profile import count_weights
from distillspec.serving.draft_loading import (
    check_finite,
    draft_name,
    load_draft,
    refusing_out_of_memory,
    version_of,
)
from distillspec.serving.engine_builder import ProposerBuilder
from distillspec.serving.execution.draft_room import DraftRoom, room_for
from distillspec.serving.execution.memory import CachePlan, check_draft_fits, longest_read
from distillspec.serving.execution.servable import check_servable
from distillspec.serving.held_models import HeldModels
from distillspec.serving.proposers.by_name import uses_draft
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.step.core import EngineCore
from distillspec.serving.step.model_executor import ModelExecutor
from distillspec.serving.usable_drafts import check_pool, is_pool, kept_states

log = logging.getLogger(__name__)

OLD_STAYS = " (the old draft stays)"


@dataclass
class EngineDrafts:
    """The drafts that an engine holds, by source: `DRAFT` for an only one, their names for those of a pool.

    Changes are queued, and happen between two steps. Until then both drafts' weights are in memory.
    """

    loaded: dict[str, LanguageModel]
    target: LanguageModel
    settings: EngineConfig
    models: HeldModels
    proposers: ProposerBuilder
    core: EngineCore
    executor: ModelExecutor
    cache: CachePlan

    def __post_init__(self) -> None:
        self.pooled = is_pool(self.loaded)

    @property
    def first(self) -> LanguageModel | None:
        """The only draft, or the pool's first. None without one."""
        return next(iter(self.loaded.values()), None)

    def load(self, path: str | Path, name: str | None, acceptance: float | None) -> str:
        """Load and check a draft, then use it. See `Engine.load_draft`.

        It lies on the device of the draft whose place it takes, a new one on the first draft's.
        """
        if not uses_draft(self.settings, with_draft=True):
            raise ConfigError(f"proposer={self.settings.proposer} uses no draft; {path} is not loaded")
        source = self._source(path, name)
        near = self.loaded.get(source, self.first) or self.target
        with refusing_out_of_memory(str(path), near.device, OLD_STAYS):
            draft = load_draft(path, self.target, near.device)
            check_target(path, self.target)
            check_finite(draft)
        check_servable(draft, longest_read(draft, self.cache.max_len))
        check_feature_ids(self.target, draft.state_ids)
        others = [model for other, model in self.loaded.items() if other != source]
        states, held = kept_states(self.settings, [*others, draft]), self.executor.runner.cache.state_ids
        states = held if states and set(draft.state_ids) <= set(held) else states  # see `_keep_states`
        check_draft_fits(self.settings, self.target, self.loaded.get(source), draft, self.cache, states, others=others)
        return self.use(draft, None, source, acceptance)

    def room_for(self, like: LanguageModel, name: str) -> DraftRoom:
        """Return the room for one more draft of this name, as large as `like`."""
        others = [model for other, model in dict(self.loaded).items() if other != name]
        states = kept_states(self.settings, [*others, like])
        return room_for(self.settings, self.target, others, replace(like, name=name), self.cache, states)

    def use(self, draft: LanguageModel, version: str | None, source: str, acceptance: float | None) -> str:
        """Draft with a loaded model, unchecked, from the next step on. Return its version (default: weights' hash)."""
        self._check_pool_serves()
        version = version_of(draft) if version is None else version
        with refusing_out_of_memory(version, draft.device, OLD_STAYS):
            self.models.hold(draft, exact=False)
            try:
                proposer, member = None, None
                if self.pooled:
                    member = self.proposers.build_member(draft, version, source)
                else:
                    proposer = self.proposers.build(draft, version)
            except BaseException:
                self.models.release(draft)
                raise

        def switch() -> None:
            if not self._serves:  # replaced since
                log.error("%s is not used: the proposer was replaced", source)
                return self._free(draft)
            old = self.loaded.get(source)
            self.loaded[source] = draft
            self._keep_states(draft)
            self._drop_states()
            change = self._change(source, acceptance, draft, old)
            if member is not None:
                self._pool.put(source, member, draft.evaluated)
                self._changed(change)
            else:
                self.executor.use_proposer(proposer)
                self.core.draft_changed(change)
            self._free(old)

        self.core.at_next_step(switch)
        return version

    def unload(self, name: str) -> None:
        """Drop a draft of a pool from the next step on. Without any, rows decode plainly.

        Raises:
            ConfigError: the pool has no such draft.
        """
        if not self.pooled or name not in self.loaded:
            held = ", ".join(self.loaded) if self.pooled else "no pool of drafts"
            raise ConfigError(f"there is no draft {name!r} to unload; this engine has {held}")
        self._check_pool_serves()

        def switch() -> None:
            if not self._serves or (old := self.loaded.pop(name, None)) is None:
                return
            self._pool.remove(name)
            self._drop_states()
            self._changed(DraftChange(name))
            self._free(old)
            if not self.loaded:
                log.error("the last draft is unloaded: nothing is drafted by a model until another is loaded")

        self.core.at_next_step(switch)

    @property
    def _pool(self) -> SideBySide:
        assert isinstance(self.executor.proposer, SideBySide)
        return self.executor.proposer

    @property
    def _serves(self) -> bool:
        """False for a pool that is not asked."""
        return not self.pooled or isinstance(self.executor.proposer, SideBySide)

    def _check_pool_serves(self) -> None:
        """Refuse to change drafts that are not asked: the proposer was replaced by hand."""
        if not self._serves:
            raise ConfigError("the proposer was replaced (use_proposer), so drafts cannot be loaded or unloaded")

    def _source(self, path: str | Path, name: str | None) -> str:
        if self.pooled:
            source = name or draft_name(path)
            check_pool(self.settings, {**self.loaded, source: self.target})
            if (named := self.settings.named_drafts) and source not in named:
                raise ConfigError(
                    f"proposer={list(self.settings.proposers)} does not name {source}; load it in the place of one of "
                    f"{', '.join(named)}"
                )
            return source
        if name is not None:
            raise ConfigError(f"{name}={path}: this engine has one draft; start it with drafts=[…] to have several")
        return DRAFT

    def _changed(self, change: DraftChange) -> None:
        self.executor.sequences.forgive_failures()
        self.core.draft_changed(change)

    def _change(
        self, source: str, acceptance: float | None, draft: LanguageModel, old: LanguageModel | None
    ) -> DraftChange:
        """Return the news of a new draft. By its size it costs what that before it did, or the one most alike."""
        known = {name: model for name, model in self.loaded.items() if name != source} if old is None else {source: old}
        times = {name: count_weights(draft) / count_weights(model) for name, model in known.items()}
        like = min(times, key=lambda name: abs(math.log(times[name])), default=None)
        return DraftChange(source, acceptance) if like is None else DraftChange(source, acceptance, like, times[like])

    def _keep_states(self, draft: LanguageModel) -> None:
        """Keep the target's states that a draft reads. Running texts are read again, if some were not kept."""
        runner = self.executor.runner
        if set(draft.state_ids) <= set(runner.cache.state_ids):
            return
        self._hand_out(kept_states(self.settings, self.loaded.values()))
        for proposer in self._pool.proposers.values() if self.pooled else ():
            if isinstance(proposer, DraftModel):
                proposer.loop.record_again()
        self.executor.read_states_again()

    def _drop_states(self) -> None:
        """Keep no states of the target once nothing reads any. Fewer ones would have to be read again."""
        if self.executor.runner.cache.state_ids and not kept_states(self.settings, self.loaded.values()):
            self._hand_out(())

    def _hand_out(self, ids: Sequence[int]) -> None:
        self.models.prepared(self.target).hand_out(ids)
        self.executor.runner.keep_states(ids)

    def _free(self, old: LanguageModel | None) -> None:
        if old is not None:
            self.models.release(old)
            return_freed_memory()


def by_source(draft: LanguageModel | Mapping[str, LanguageModel] | None) -> dict[str, LanguageModel]:
    """Return drafts by source."""
    if isinstance(draft, Mapping):
        return dict(draft)
    return {} if draft is None else {DRAFT: draft}
