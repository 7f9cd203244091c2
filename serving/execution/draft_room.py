"""Room for one more draft in a pool: whether its cache fits now, and the slots that it leaves at the next start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.memory import SHARE, free_bytes, token_bytes
from distillspec.serving.execution.memory import GIB, CachePlan, check_draft_fits


class DraftRoom(NamedTuple):
    """Room for one more draft.

    problem: why it does not fit beside the others now, in one line with its name. None: it fits.
    slots: of the next start with it, at most those of now. Its cache and weights take memory that others would have.
    """

    problem: str | None
    slots: int


def room_for(
    settings: EngineConfig,
    target: LanguageModel,
    others: Sequence[LanguageModel],
    new: LanguageModel,
    plan: CachePlan,
    feature_ids: Sequence[int] = (),
) -> DraftRoom:
    """Return the room for a draft that is not loaded yet.

    Args:
        others: drafts in use.
        new: a model of its size, with its name.
        plan: of the caches in use.
        feature_ids: states of the target that are kept with it.
    """
    try:
        check_draft_fits(settings, target, None, new, plan, feature_ids, others=others)
    except ConfigError as error:
        return DraftRoom(str(error), 0)
    if new.device != target.device:  # its memory is not that of the slots
        return DraftRoom(None, plan.slots)
    others = [draft for draft in others if draft.device == target.device]
    budget = _next_budget(settings, target, [target, *others], new, plan, feature_ids)
    if budget is None:
        return DraftRoom(None, plan.slots)
    tokens = budget // token_bytes([target, *others, new], feature_ids)
    return DraftRoom(None, min(plan.slots, int(plan.slots * tokens / plan.tokens)))


def _next_budget(
    settings: EngineConfig,
    target: LanguageModel,
    resident: Sequence[LanguageModel],
    new: LanguageModel,
    plan: CachePlan,
    feature_ids: Sequence[int],
) -> float | None:
    """Return the bytes that the next start has for caches, None if the free memory is unknown."""
    if settings.cache_gib is not None:
        return settings.cache_gib * GIB
    free = free_bytes(target.device)
    if free is None:
        return None
    taken = 0 if plan.lazy else plan.bytes(resident, feature_ids)  # lazy memory may never have been taken
    weights = sum(weight.numel() * weight.element_size() for weight in new.model.parameters())
    return SHARE * (free + taken - weights)
