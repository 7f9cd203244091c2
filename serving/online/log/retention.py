"""Retention of the replay log: drops shards by age and by size, first in first out or by reservoir sampling."""

from __future__ import annotations

import random
from collections.abc import Callable

from distillspec.config import ReplayConfig
from distillspec.serving.online.log.manifest import Manifest, ShardRow
from distillspec.serving.online.log.shard_files import ShardFiles

MIB = 1 << 20
FULL = 0.9  # of `replay.max_mib`. Whole shards are added and dropped, so the budget is rarely met exactly.


class Retention:
    """Keeps the log within `replay.retention_days` and `replay.max_mib`."""

    def __init__(
        self, manifest: Manifest, files: ShardFiles, config: ReplayConfig, clock: Callable[[], float], seed: int
    ) -> None:
        self._manifest = manifest
        self._files = files
        self._config = config
        self._clock = clock
        self._random = random.Random(seed)
        self.full = False  # New answers replace others. Known only after this process's first write.

    def make_room(self) -> None:
        """Drop shards past their retention, then those over the budget."""
        oldest_s = self._clock() - self._config.retention_days * 86400
        self._drop([row.id for row in self._manifest.shards() if row.newest_s < oldest_s], "expired_shards")
        shards, budget = self._manifest.shards(), int(self._config.max_mib * MIB)
        self.full = _bytes(shards) >= FULL * budget
        if self._config.keep == "fifo":
            self._drop_oldest(shards, budget)
        else:
            self._age(shards, int(budget * self._config.fresh_share), budget)

    def _drop_oldest(self, shards: list[ShardRow], budget: int) -> None:
        total, dropped = _bytes(shards), []
        for row in shards[:-1]:
            if total <= budget:
                break
            total -= row.bytes
            dropped.append(row.id)
        self._drop(dropped, "replaced_shards")

    def _age(self, shards: list[ShardRow], fresh_budget: int, budget: int) -> None:
        """Offer the oldest fresh shards to the reservoir while the fresh ones are over budget (Vitter 1985, R).

        The n-th shard offered is kept if there is room. Otherwise it replaces a random one with probability places / n,
        or is dropped.
        """
        fresh = [row for row in shards if row.fresh]
        total = _bytes(fresh)
        for row in fresh[:-1]:
            if total <= fresh_budget:
                break
            total -= row.bytes
            self._offer(row, budget - fresh_budget)

    def _offer(self, shard: ShardRow, budget: int) -> None:
        kept = [row for row in self._manifest.shards() if not row.fresh]
        offered = self._manifest.add("reservoir_asked", 1)
        used, dropped = _bytes(kept), []
        if used + shard.bytes > budget:
            if not kept or self._random.random() >= len(kept) / offered:
                self._drop([shard.id], "replaced_shards")
                return
            self._random.shuffle(kept)
            while kept and used + shard.bytes > budget:
                row = kept.pop()
                used -= row.bytes
                dropped.append(row.id)
        self._drop(dropped, "replaced_shards")
        self._manifest.keep(shard.id)

    def _drop(self, shards: list[int], counter: str) -> None:
        self._files.remove(shards)
        self._manifest.add(counter, len(shards))


def _bytes(shards: list[ShardRow]) -> int:
    return sum(row.bytes for row in shards)
