"""How many slots of which length the engine can have: one budget for the caches of target and draft together."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.memory import SHARE, free_bytes, kv_bytes_per_token
from distillspec.serving.settings import EngineSettings

DEFAULT_MODEL_LEN = 4096
GIB = 2**30


def choose_model_len(settings: EngineSettings, target: LanguageModel) -> int:
    """Prompt and output together: what was asked, or what the model reads, at most 4,096.

    Raises:
        ConfigError: more was asked than the model reads.
    """
    limit = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    if settings.max_model_len is None:
        return DEFAULT_MODEL_LEN if limit is None else min(limit, DEFAULT_MODEL_LEN)
    if limit is not None and settings.max_model_len > limit:
        raise ConfigError(f"max_model_len={settings.max_model_len}: {target.name} reads at most {limit} tokens")
    return settings.max_model_len


def choose_slots(settings: EngineSettings, models: Seq[LanguageModel], max_len: int) -> int:
    """At most `max_slots`, as many as the cache's memory holds.

    Raises:
        ConfigError: not even one slot fits.
    """
    free = free_bytes(models[0].device)
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
