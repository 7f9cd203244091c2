"""How many slots of which length the engine can have: one budget for the caches of target and draft together."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.memory import SHARE, free_bytes, kv_bytes_per_token
from distillspec.serving.settings import EngineSettings

DEFAULT_MODEL_LEN = 4096
GIB = 2**30


def choose_model_len(settings: EngineSettings, models: Seq[LanguageModel]) -> int:
    """Prompt and output together: what was asked, or what all the models read, at most 4,096.

    Raises:
        ConfigError: more was asked than a model reads.
    """
    limits = {model.name: _reads(model) for model in models}
    if settings.max_model_len is None:
        return min([DEFAULT_MODEL_LEN, *(limit for limit in limits.values() if limit is not None)])
    for model in models:
        check_reads(model, settings.max_model_len)
    return settings.max_model_len


def check_reads(model: LanguageModel, max_model_len: int) -> None:
    """Raise `ConfigError` for a model that reads less than `max_model_len` tokens."""
    limit = _reads(model)
    if limit is not None and max_model_len > limit:
        raise ConfigError(f"max_model_len={max_model_len}: {model.name} reads at most {limit} tokens")


def _reads(model: LanguageModel) -> int | None:
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def choose_slots(settings: EngineSettings, models: Seq[LanguageModel], max_len: int) -> int:
    """At most `max_slots`, as many as the cache's memory holds.

    Raises:
        ConfigError: not even one slot fits.
    """
    free = free_bytes(models[0].device)
    if settings.cache_gib is not None and free is not None and settings.cache_gib * GIB > free:
        raise ConfigError(f"cache_gib={settings.cache_gib}: only {free / GIB:.2f} GiB are free on {models[0].device}")
    budget = settings.cache_gib * GIB if settings.cache_gib is not None else None if free is None else SHARE * free
    per_slot = (max_len + 1) * sum(kv_bytes_per_token(model) for model in models)
    if budget is None:
        return settings.max_slots
    if budget < per_slot:
        raise ConfigError(
            f"one sequence of max_model_len={max_len} needs {per_slot / GIB:.2f} GiB of cache and there are "
            f"{budget / GIB:.2f}; lower max_model_len, or raise cache_gib if memory is there"
        )
    return min(settings.max_slots, int(budget // per_slot))


def check_draft_fits(
    settings: EngineSettings,
    target: LanguageModel,
    old: LanguageModel | None,
    new: LanguageModel,
    slots: int,
    max_len: int,
) -> None:
    """Raise `ConfigError` where the cache of a `new` draft, in place of the `old` one's, exceeds the cache's memory.

    The budget is `cache_gib`; without one, half of what is free now may be added to what the old draft's cache took.
    """
    places = slots * (max_len + 1)
    needed = places * kv_bytes_per_token(new)
    if settings.cache_gib is not None:
        left = settings.cache_gib * GIB - places * kv_bytes_per_token(target)
    else:
        free = free_bytes(target.device)
        left = math.inf if free is None else SHARE * free
        left += 0 if old is None else places * kv_bytes_per_token(old)
    if needed > left:
        raise ConfigError(
            f"the draft {new.name} needs {needed / GIB:.2f} GiB of cache for {slots} slots of {max_len} tokens, and "
            f"{max(left, 0) / GIB:.2f} are left beside the target's; raise cache_gib if memory is there, or lower "
            "max_slots or max_model_len (the old draft stays)"
        )
