"""What an update learns from: new answers with a fair share for every tenant, old ones, and the offline set."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from distillspec.config import AdaptConfig
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.data.shards import read_samples
from distillspec.errors import ConfigError
from distillspec.serving.online.fairness import fair_level
from distillspec.serving.online.replay_log import Entry
from distillspec.types import ModelIdentity, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """Entries and samples of one update; `new` are in order."""

    new: list[Entry]
    old: list[Entry]
    offline: list[Sample]
    capped: int  # new answers left out so that no tenant has too large a share


def select(
    new: Sequence[Entry], old: Sequence[Entry], offline: Sequence[Sample], config: AdaptConfig, seed: int
) -> Selection:
    """Mix by tokens: `replay_share` and `offline_share` of the whole, the rest new; flush mode takes new ones alone."""
    rng = random.Random(seed)
    kept = cap_tenants(new, config.tenant_share, rng)
    capped = len(new) - len(kept)
    if config.mode == "flush":
        return Selection(kept, [], [], capped)
    tokens = sum(entry.tokens for entry in kept)
    whole = tokens / (1 - config.replay_share - config.offline_share)
    fair_old = cap_tenants(old, config.tenant_share, rng)
    return Selection(
        kept,
        _up_to(config.replay_share * whole, fair_old, lambda entry: entry.tokens, rng),
        _up_to(config.offline_share * whole, offline, lambda sample: len(sample.response_ids), rng),
        capped,
    )


def cap_tenants(entries: Sequence[Entry], share: float, rng: random.Random) -> list[Entry]:
    """The entries, thinned at random so that no tenant among several has more than `share` of the tokens.

    With so few tenants that their shares could not make a whole, every one gets an equal part.
    """
    tokens: dict[str, int] = {}
    for entry in entries:
        tokens[entry.tenant] = tokens.get(entry.tenant, 0) + entry.tokens
    if len(tokens) < 2:
        return list(entries)
    limit = fair_level(list(tokens.values()), share)
    kept: set[int] = set()
    for tenant, total in tokens.items():
        own = [entry for entry in entries if entry.tenant == tenant]
        chosen = own if total <= limit else _up_to(limit, own, lambda entry: entry.tokens, rng, strict=True)
        kept |= {entry.number for entry in chosen}
    return [entry for entry in entries if entry.number in kept]


def _up_to(
    tokens: float, items: Sequence[T], size: Callable[[T], int], rng: random.Random, *, strict: bool = False
) -> list[T]:
    """Random items of about so many tokens together (not more, if strict), in their order."""
    order = list(range(len(items)))
    rng.shuffle(order)
    chosen, used = [], 0
    for place in order:
        if used + (size(items[place]) if strict else 0) > tokens or used >= tokens:
            break
        chosen.append(place)
        used += size(items[place])
    return [items[place] for place in sorted(chosen)]


def offline_folder(config: AdaptConfig) -> DataFolder | None:
    """The offline distillation set's folder, if one is named.

    Raises:
        ConfigError: it is not one.
    """
    if config.offline is None:
        return None
    try:
        return find_data_folder(config.offline)
    except ConfigError as error:
        raise ConfigError(
            f"adapt.offline={config.offline} is not a data folder; make one with distill generate"
        ) from error


def offline_samples(config: AdaptConfig, identity: ModelIdentity, entries: int) -> list[Sample]:
    """Training samples of the offline set, with signals as the log's.

    Raises:
        ConfigError: made with another target, or without the signal.
    """
    folder = offline_folder(config)
    if folder is None or config.offline_share == 0:
        return []
    samples = read_samples(folder.samples, identity)
    usable = [
        s for s in samples if s.signal is not None and s.signal.kind == "topk" and s.signal.ids.shape[1] == entries
    ]
    if not usable:
        raise ConfigError(
            f"adapt.offline={config.offline} has no top-{entries} signals; make it with distill generate "
            f"data.signal=topk data.signal_entries={entries}"
        )
    return usable
