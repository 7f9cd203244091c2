"""Slots of an engine and the tokens they hold: one memory budget for the caches of target and draft together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.language_model import attention_heads
from distillspec.models.lazy_memory import commits_lazily, tokens_a_page
from distillspec.models.memory import cache_budget, free_bytes, slot_bytes, slots_that_fit, token_bytes
from distillspec.models.pages import Pages

DEFAULT_MODEL_LEN = 4096
GIB = 2**30


@dataclass(frozen=True)
class CachePlan:
    """Slots of an engine's caches.

    Attributes:
        slots: sequences at a time.
        max_len: tokens that one of them may have.
        tokens: over all slots.
        lazy: memory is taken as texts grow, not at once.
        block: memory is counted in so many tokens, where not all slots can be full. With pages, those of a page.
        page_count: pages that the slots share, 0: each has memory of its own.
    """

    slots: int
    max_len: int
    tokens: int
    lazy: bool = False
    block: int = 1
    page_count: int = 0

    def bytes(self, models: Sequence[LanguageModel], feature_ids: Sequence[int] = ()) -> int:
        """Return the most bytes that the caches of these models take. The states `feature_ids` are the first one's."""
        if self.page_count:
            return (1 + self.page_count) * self.block * token_bytes(models, feature_ids)
        whole = self.slots * slot_bytes(models, self.max_len, feature_ids)
        return min(whole, self.tokens * token_bytes(models, feature_ids)) if self.lazy else whole

    def pages(self) -> Pages | None:
        """Return the pages that the slots share, None if each has memory of its own."""
        return Pages(self.slots, self.max_len, self.page_count, self.block) if self.page_count else None

    def describe(self, models: Sequence[LanguageModel], feature_ids: Sequence[int] = ()) -> str:
        """Describe the slots and their memory for the log."""
        size = f"{self.bytes(models, feature_ids) / GIB:.2f} GiB"
        when = "as texts grow" if self.lazy else f"at once, in pages of {self.block}" if self.page_count else "at once"
        return f"{self.slots} slots of {self.max_len} tokens, together {self.tokens} in {size} taken {when}"


def choose_model_len(settings: EngineConfig, target: LanguageModel) -> int:
    """Return the most tokens of prompt and output together.

    That is `settings.max_model_len`, or by default the longest context that the target reads, at most 4,096. A draft
    with a shorter context drafts for no longer texts than that.

    Raises:
        ConfigError: `max_model_len` exceeds the target's context.
    """
    limit, wanted = target.longest_text, settings.max_model_len
    if wanted is None:
        return DEFAULT_MODEL_LEN if limit is None else min(DEFAULT_MODEL_LEN, limit)
    if limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len={wanted}: {target.name} reads at most {limit} tokens")
    return wanted


def longest_read(draft: LanguageModel, max_model_len: int) -> int:
    """Return the most tokens of a text that a draft reads, where texts have up to `max_model_len`."""
    return max_model_len if draft.longest_text is None else min(max_model_len, draft.longest_text)


def plan_cache(
    settings: EngineConfig,
    models: Sequence[LanguageModel],
    max_len: int,
    feature_ids: Sequence[int] = (),
    page: int = 0,
) -> CachePlan:
    """Return the slots that fit the cache's memory, at most `max_slots`, and the tokens that they may hold.

    Of the first model, the target, the states `feature_ids` are kept too.

    Where memory is committed as it is written, or slots share it in pages (of `page` tokens), there may be more slots
    than could all be full.

    Raises:
        ConfigError: not even one slot fits, or `cache_gib` exceeds the free memory.
    """
    budget = _budget(settings, models[0].device)
    lazy = commits_lazily(models[0].device)
    if page:
        fitting = math.inf if budget is None else budget // token_bytes(models, feature_ids)
        plan = _paged_plan(settings.max_slots, max_len, page, fitting, settings.max_cache_tokens or math.inf)
    elif budget is None:
        plan = CachePlan(settings.max_slots, max_len, settings.max_slots * max_len, lazy)
    elif lazy:
        plan = _lazy_plan(settings.max_slots, max_len, int(budget // token_bytes(models, feature_ids)), models)
    else:
        slots = slots_that_fit(models, settings.max_slots, max_len, budget, feature_ids)
        plan = CachePlan(slots, max_len, slots * max_len)
    if plan.slots == 0:
        needed = slot_bytes(models, max_len, feature_ids)
        raise ConfigError(
            f"one sequence of max_model_len={max_len} needs {needed / GIB:.2f} GiB of cache and "
            f"there are {(budget or 0) / GIB:.2f}; lower max_model_len, or raise cache_gib if memory is there"
        )
    if page or settings.max_cache_tokens is None:
        return plan
    return replace(plan, tokens=min(plan.tokens, settings.max_cache_tokens), block=1)


def _budget(settings: EngineConfig, device: torch.device) -> float | None:
    """Return the bytes for caches, None if the free memory is unknown."""
    if settings.cache_gib is None:
        return cache_budget(device)
    free = free_bytes(device)
    if free is not None and settings.cache_gib * GIB > free:
        raise ConfigError(f"cache_gib={settings.cache_gib}: only {free / GIB:.2f} GiB are free on {device}")
    return settings.cache_gib * GIB


def _lazy_plan(most: int, max_len: int, tokens: int, models: Sequence[LanguageModel]) -> CachePlan:
    """Plan for `tokens` in memory, which texts fill page by page."""
    page = max(tokens_a_page(attention_heads(model).dim * model.dtype.itemsize) for model in models)
    longest = -(-(max_len + 1) // page) * page
    if tokens >= most * longest:
        return CachePlan(most, max_len, most * max_len, True)
    return CachePlan(most if tokens >= longest else 0, max_len, tokens // page * page, True, page)


def _paged_plan(most: int, max_len: int, page: int, fitting: float, wanted: float) -> CachePlan:
    """Plan pages for at most `wanted` tokens of text, where memory has room for `fitting`.

    Reservations are whole pages, but a full slot may end within one more. Page 0 holds no text.

    Raises:
        ConfigError: `wanted` is less than a page.
    """
    if wanted < page:
        raise ConfigError(f"max_cache_tokens={wanted} is less than a page of {page} tokens; set page_tokens lower")
    partial = most if max_len % page else 0
    room = (fitting // page - 1 - partial) * page
    tokens = min(room, wanted, most * max_len)
    tokens = int(tokens if tokens == most * max_len else tokens // page * page)
    count = min(-(-tokens // page) + partial, most * -(-max_len // page))
    return CachePlan(most if room >= max_len else 0, max_len, tokens, block=page, page_count=count)


def check_elsewhere(plan: CachePlan, drafts: Sequence[LanguageModel]) -> None:
    """Refuse drafts on other devices than the target, where their caches of the plan's slots do not fit there.

    Raises:
        ConfigError: names the last draft of the device.
    """
    for device in dict.fromkeys([draft.device for draft in drafts]):
        there = [draft for draft in drafts if draft.device == device]
        budget, needed = cache_budget(device), plan.bytes(there)
        if budget is not None and needed > budget:
            raise ConfigError(
                f"the cache of {there[-1].name} does not fit on {device}: {needed / GIB:.2f} GiB for {plan.slots} "
                f"slots of {plan.max_len} tokens, and {budget / GIB:.2f} are there; lower max_slots or max_model_len"
            )


def check_draft_fits(
    settings: EngineConfig,
    target: LanguageModel,
    old: LanguageModel | None,
    new: LanguageModel,
    plan: CachePlan,
    feature_ids: Sequence[int] = (),
    *,
    others: Sequence[LanguageModel] = (),
) -> None:
    """Refuse a `new` draft whose cache, in place of the `old` one's, exceeds the cache's memory.

    `feature_ids`: states of the target that are kept with it. `others`: drafts that stay.

    The budget is `cache_gib`. Without one, half of what is free now may be added to what the old draft's cache took.

    Raises:
        ConfigError: it does not fit, and the old draft stays.
    """
    needed, device = plan.bytes([new]), new.device
    if settings.cache_gib is not None and device == target.device:
        near = [draft for draft in others if draft.device == device]
        left = settings.cache_gib * GIB - plan.bytes([target, *near], feature_ids)
    else:
        budget = cache_budget(device)
        left = math.inf if budget is None else budget
        stays = old is None or old.device != device or plan.lazy  # lazy memory may never have been taken
        left += 0 if old is None or stays else plan.bytes([old])
    if needed > left:
        beside = "beside the target's" if device == target.device else f"on {device}"
        raise ConfigError(
            f"the draft {new.name} needs {needed / GIB:.2f} GiB of cache for {plan.slots} slots of {plan.max_len} "
            f"tokens, and {max(left, 0) / GIB:.2f} are left {beside}; raise cache_gib if memory is there, "
            "or lower max_slots or max_model_len (the old draft stays)"
        )
