"""Selection of an update's training text: new answers with fair weights for tenants, old ones, the offline set."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from distillspec.config import AdaptConfig
from distillspec.data.folder import DataFolder, find_data_folder
from distillspec.data.shards import read_samples
from distillspec.errors import ConfigError
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.training.fairness import fair_weights, newest_within
from distillspec.types import ModelIdentity, Sample

T = TypeVar("T")
OLD_ANSWERS = 4096
TENANT, TOKENS = attrgetter("tenant"), attrgetter("tokens")  # of an entry


@dataclass(frozen=True)
class Selection:
    """Entries and samples of one update. `new` is in order of arrival."""

    new: list[LogEntry]
    old: list[LogEntry]
    offline: list[Sample]
    capped: int  # new answers of tenants whose weight is below 1
    weights: dict[str, float]  # tenant → weight of its tokens, at most 1

    @property
    def logged(self) -> list[LogEntry]:
        """Return all entries of the log."""
        return [*self.new, *self.old]


def select(
    new: Sequence[LogEntry], old: Sequence[LogEntry], offline: Sequence[Sample], config: AdaptConfig, seed: int
) -> Selection:
    """Mix by tokens: `replay_share` and `offline_share` of the whole, the rest new. Flush mode takes only new ones."""
    rng = random.Random(seed)
    tokens = sum(entry.tokens for entry in new)
    whole = tokens / (1 - config.replay_share - config.offline_share)
    chosen: list[LogEntry] = []
    samples: list[Sample] = []
    if config.mode != "flush":
        shuffled = rng.sample(old, len(old))
        room = min(config.replay_share * whole, sum(entry.tokens for entry in old))
        chosen = newest_within(shuffled, room, TENANT, TOKENS) if room else []
        samples = _up_to(config.offline_share * whole, offline, lambda sample: len(sample.response_ids), rng)
    weights = _weights([*new, *chosen], config.tenant_share)
    capped = sum(weights[entry.tenant] < 1 for entry in new)
    return Selection(list(new), sorted(chosen, key=lambda entry: entry.number), samples, capped, weights)


def old_entries(replay: ReplayLog, up_to: int, config: AdaptConfig, seed: int) -> list[LogEntry]:
    """Return the answers up to a number, among which an update's share of old ones is drawn: at most `OLD_ANSWERS`."""
    if config.mode == "flush" or config.replay_share == 0:
        return []
    old = replay.entries(up_to=up_to)
    if len(old) <= OLD_ANSWERS:
        return old
    return sorted(random.Random(seed).sample(old, OLD_ANSWERS), key=lambda entry: entry.number)


def newest_that_fit(entries: Sequence[LogEntry], tokens: float) -> list[LogEntry]:
    """Return the newest entries within `tokens`, shared out among tenants."""
    return newest_within(entries, tokens, TENANT, TOKENS)


def _weights(entries: Sequence[LogEntry], share: float) -> dict[str, float]:
    tokens: dict[str, float] = {}
    for entry in entries:
        tokens[entry.tenant] = tokens.get(entry.tenant, 0) + entry.tokens
    return fair_weights(tokens, share)


def _up_to(tokens: float, items: Sequence[T], size: Callable[[T], int], rng: random.Random) -> list[T]:
    """Return random items of about `tokens` tokens in total, in their order."""
    order = list(range(len(items)))
    rng.shuffle(order)
    chosen, used = [], 0
    for index in order:
        if used >= tokens:
            break
        chosen.append(index)
        used += size(items[index])
    return [items[index] for index in sorted(chosen)]


def offline_folder(config: AdaptConfig) -> DataFolder | None:
    """Return the data folder of `adapt.offline`. None: it is not set.

    Raises:
        ConfigError: it is not a data folder.
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
    """Return the offline set's training samples that have top-`entries` signals, as the log's answers do.

    Raises:
        ConfigError: the set was made with another target, or has no such signals.
    """
    folder = offline_folder(config)
    if folder is None or config.offline_share == 0:
        return []
    samples = read_samples(folder.samples, identity)
    requests = [None if s.signal is None else s.signal.request for s in samples]
    usable = [s for s, r in zip(samples, requests, strict=True) if r and (r.kind, r.entries) == ("topk", entries)]
    if not usable:
        raise ConfigError(
            f"adapt.offline={config.offline} has no top-{entries} signals; make it with distill generate "
            f"data.signal=topk data.signal_entries={entries}"
        )
    return usable
