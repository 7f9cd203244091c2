"""Drafts that an engine can use. Of several, those that it cannot are refused by name, and the others serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distillspec.models import LanguageModel
from distillspec.models.features import check_feature_ids
from distillspec.models.table_sizes import require_same_ids
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.draft_loading import accepted, refusing_out_of_memory
from distillspec.serving.execution.memory import CachePlan, longest_read
from distillspec.serving.execution.servable import check_servable
from distillspec.serving.held_models import HeldModels

PlanCache = Callable[[list[LanguageModel]], CachePlan]  # of these drafts beside the target


def is_pool(drafts: Mapping[str, LanguageModel]) -> bool:
    """Return True if drafts by source are those of a pool, however many: an only draft is called `DRAFT`."""
    return bool(drafts) and DRAFT not in drafts


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
