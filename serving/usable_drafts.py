"""Drafts that an engine can use. Of several, those that it cannot are refused by name, and the others serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from distillspec.config.engine import EngineConfig
from distillspec.config.registry import PROPOSERS
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.features import check_feature_ids
from distillspec.models.table_sizes import require_same_ids
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.draft_loading import accepted, refusing_out_of_memory
from distillspec.serving.execution.memory import CachePlan, longest_read
from distillspec.serving.execution.servable import check_servable
from distillspec.serving.held_models import HeldModels
from distillspec.serving.proposers.by_name import SOURCES
from distillspec.serving.selection.by_name import check_selection

PlanCache = Callable[[list[LanguageModel]], CachePlan]  # of these drafts beside the target


def is_pool(drafts: Mapping[str, LanguageModel]) -> bool:
    """Return True if drafts by source are those of a pool, however many: an only draft is called `DRAFT`."""
    return bool(drafts) and DRAFT not in drafts


def check_pool(settings: EngineConfig, drafts: Mapping[str, LanguageModel]) -> None:
    """Refuse names of drafts that other sources have, and selections that there are not.

    Raises:
        ConfigError: names the draft or the setting.
    """
    for name in drafts:
        if name in SOURCES or name in PROPOSERS or (name == DRAFT and len(drafts) > 1):
            raise ConfigError(f"a draft cannot be called {name}, as a proposer is; rename its folder")
    check_selection(settings.selection, settings.selection_options)


def kept_states(settings: EngineConfig, drafts: Iterable[LanguageModel]) -> tuple[int, ...]:
    """Return the states of the target to keep: those that settings name, and those that drafts read."""
    return tuple(dict.fromkeys([*settings.feature_ids, *(state for draft in drafts for state in draft.state_ids)]))


def servable_drafts(
    drafts: Mapping[str, LanguageModel], target: LanguageModel, max_model_len: int
) -> dict[str, LanguageModel]:
    """Return the drafts that can draft for a target, by source.

    Raises:
        ConfigError: the only one cannot, or none of a pool.
    """

    def take(name: str) -> LanguageModel:
        draft = drafts[name]
        with refusing_out_of_memory(name, draft.device):
            check_feature_ids(target, draft.state_ids)
            check_servable(draft, longest_read(draft, max_model_len))
            require_same_ids(draft, target)
        return draft

    return accepted(drafts, take) if is_pool(drafts) else {name: take(name) for name in drafts}


def hold_fitting(drafts: Mapping[str, LanguageModel], held: HeldModels, plan: PlanCache) -> dict[str, LanguageModel]:
    """Prepare drafts, in their order, and return those whose weights and caches fit beside the target's.

    Raises:
        ConfigError: not even the target fits, or the only draft, or none of a pool.
    """
    plan([])
    kept = list[LanguageModel]()

    def take(name: str) -> LanguageModel:
        draft = drafts[name]
        with refusing_out_of_memory(name, draft.device):
            held.hold(draft, exact=False)
        try:
            plan([*kept, draft])
        except BaseException:
            held.release(draft)
            raise
        kept.append(draft)
        return draft

    return accepted(drafts, take) if is_pool(drafts) else {name: take(name) for name in drafts}
