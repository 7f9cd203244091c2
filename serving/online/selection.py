"""What an update learns from: new answers with a fair weight for every tenant, old ones, and the offline set."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from distillspec.config import AdaptConfig
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.data.shards import read_samples
from distillspec.errors import ConfigError
from distillspec.serving.online.fairness import fair_weights, newest_within
from distillspec.serving.online.replay_log import Entry
from distillspec.types import ModelIdentity, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """Entries and samples of one update; `new` are in order."""

    new: list[Entry]
    old: list[Entry]
    offline: list[Sample]
    capped: int  # new answers that count for less so that no tenant has too large a share
    weights: dict[str, float]  # tenant → what its tokens count for, at most 1


def select(
    new: Sequence[Entry], old: Sequence[Entry], offline: Sequence[Sample], config: AdaptConfig, seed: int
) -> Selection:
    """Mix by tokens: `replay_share` and `offline_share` of the whole, the rest new; flush mode takes new ones alone."""
    rng = random.Random(seed)
    tokens = sum(entry.tokens for entry in new)
    whole = tokens / (1 - config.replay_share - config.offline_share)
    chosen: list[Entry] = []
    samples: list[Sample] = []
    if config.mode != "flush":
        shuffled = rng.sample(old, len(old))
        room = min(config.replay_share * whole, sum(entry.tokens for entry in old))
        chosen = newest_within(shuffled, room, _tenant, _tokens) if room else []
        samples = _up_to(config.offline_share * whole, offline, lambda sample: len(sample.response_ids), rng)
    weights = _weights([*new, *chosen], config.tenant_share)
    capped = sum(weights[entry.tenant] < 1 for entry in new)
    return Selection(list(new), sorted(chosen, key=lambda entry: entry.number), samples, capped, weights)


def newest_that_fit(entries: Sequence[Entry], tokens: float) -> list[Entry]:
    """The newest entries of every tenant that an update has time for."""
    return newest_within(entries, tokens, _tenant, _tokens)


def _weights(entries: Sequence[Entry], share: float) -> dict[str, float]:
    tokens: dict[str, float] = {}
    for entry in entries:
        tokens[entry.tenant] = tokens.get(entry.tenant, 0) + entry.tokens
    return fair_weights(tokens, share)


def _tenant(entry: Entry) -> str:
    return entry.tenant


def _tokens(entry: Entry) -> float:
    return entry.tokens


def _up_to(tokens: float, items: Sequence[T], size: Callable[[T], int], rng: random.Random) -> list[T]:
    """Random items of about so many tokens together, in their order."""
    order = list(range(len(items)))
    rng.shuffle(order)
    chosen, used = [], 0
    for place in order:
        if used >= tokens:
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
