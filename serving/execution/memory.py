"""Number and length of an engine's slots: one memory budget for the caches of target and draft together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.memory import cache_budget, free_bytes, slot_bytes, slots_that_fit

DEFAULT_MODEL_LEN = 4096
GIB = 2**30


def choose_model_len(settings: EngineConfig, models: Sequence[LanguageModel]) -> int:
    """Return the most tokens of prompt and output together.

    That is `settings.max_model_len`, or by default the longest context that all models read, at most 4,096.

    Raises:
        ConfigError: `max_model_len` exceeds a model's context.
    """
    limits = {model.name: _context(model) for model in models}
    if settings.max_model_len is None:
        return min([DEFAULT_MODEL_LEN, *(limit for limit in limits.values() if limit is not None)])
    for model in models:
        check_reads(model, settings.max_model_len)
    return settings.max_model_len


def check_reads(model: LanguageModel, max_model_len: int) -> None:
    """Raise ConfigError if a model's context is shorter than `max_model_len` tokens."""
    limit = _context(model)
    if limit is not None and max_model_len > limit:
        raise ConfigError(f"max_model_len={max_model_len}: {model.name} reads at most {limit} tokens")


def _context(model: LanguageModel) -> int | None:
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def choose_slots(settings: EngineConfig, models: Sequence[LanguageModel], max_len: int) -> int:
    """Return how many slots fit the cache's memory, at most `max_slots`.

    Raises:
        ConfigError: not even one slot fits, or `cache_gib` exceeds the free memory.
    """
    device = models[0].device
    free = free_bytes(device)
    budget = cache_budget(device)
    if settings.cache_gib is not None:
        budget = settings.cache_gib * GIB
        if free is not None and budget > free:
            raise ConfigError(f"cache_gib={settings.cache_gib}: only {free / GIB:.2f} GiB are free on {device}")
    if budget is None:
        return settings.max_slots
    slots = slots_that_fit(models, settings.max_slots, max_len, budget, settings.feature_ids)
    if slots == 0:
        needed = slot_bytes(models, max_len, settings.feature_ids)
        raise ConfigError(
            f"one sequence of max_model_len={max_len} needs {needed / GIB:.2f} GiB of cache and "
            f"there are {budget / GIB:.2f}; lower max_model_len, or raise cache_gib if memory is there"
        )
    return slots


def check_draft_fits(
    settings: EngineConfig,
    target: LanguageModel,
    old: LanguageModel | None,
    new: LanguageModel,
    slots: int,
    max_len: int,
) -> None:
    """Refuse a `new` draft whose cache, in place of the `old` one's, exceeds the cache's memory.

    The budget is `cache_gib`. Without one, half of what is free now may be added to what the old draft's cache took.

    Raises:
        ConfigError: it does not fit, and the old draft stays.
    """
    needed = slots * slot_bytes([new], max_len)
    if settings.cache_gib is not None:
        left = settings.cache_gib * GIB - slots * slot_bytes([target], max_len, settings.feature_ids)
    else:
        budget = cache_budget(target.device)
        left = math.inf if budget is None else budget
        left += 0 if old is None else slots * slot_bytes([old], max_len)
    if needed > left:
        raise ConfigError(
            f"the draft {new.name} needs {needed / GIB:.2f} GiB of cache for {slots} slots of {max_len} tokens, and "
            f"{max(left, 0) / GIB:.2f} are left beside the target's; raise cache_gib if memory is there, or lower "
            "max_slots or max_model_len (the old draft stays)"
        )
