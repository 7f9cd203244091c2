"""Feed of training batches: endless, resumable, one share a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distillspec.config import TrainConfig
from distillspec.data.packing import collate, plan_epoch
from distillspec.training.state_store import StateStore
from distillspec.types import Sample, TokenBatch


class SampleFeed:
    """Batches over a set of samples, epoch after epoch. Every process takes its own share of each epoch.

    With `state()` and `restore()` a resumed run gets the same batches.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        config: TrainConfig,
        pad_id: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        keep: int = 1,
        states: StateStore | None = None,
    ) -> None:
        """`keep`: the number of refreshes whose fresh samples are used at a time. `states`: added to every batch."""
        self.states = states
        self.config = config
        self.pad_id = pad_id
        self.seed = seed
        self.rank = rank
        self.world = world
        self.keep = keep
        self.epoch, self.next_batch = 0, 0
        self.samples = list(samples)
        self._refreshes = [len(self.samples)] if self.samples else []  # samples a refresh, oldest first
        self.plan = self._plan_epoch()

    def renew(self, samples: Sequence[Sample]) -> None:
        """Continue with fresh samples and those of the `keep` − 1 refreshes before, from their first batch."""
        self._refreshes = [*self._refreshes, len(samples)][-self.keep :]
        known = [*self.samples, *samples]
        self.samples = known[len(known) - sum(self._refreshes) :]
        if self.states is not None:
            self.states.keep(self.samples)
        self.next_batch = 0
        self.plan = self._plan_epoch()

    def take(self) -> TokenBatch:
        """Return the next batch of this process."""
        if self.next_batch >= len(self.plan):
            self.epoch, self.next_batch = self.epoch + 1, 0
            self.plan = self._plan_epoch()
        rows = self.plan[self.next_batch]
        self.next_batch += 1
        batch = [[self.samples[i] for i in row] for row in rows]
        # A sample longer than a row has a longer row to itself: if it were cut, its end would never be learnt.
        longest = max(len(sample) for row in batch for sample in row)
        tokens = collate(batch, max(self.config.row_tokens, longest), self.pad_id)
        if self.states is None:
            return tokens
        return replace(tokens, states=self.states.rows(batch, tokens.input_ids.shape[1]))

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next_batch": self.next_batch, "refreshes": self._refreshes}

    def restore(self, state: dict[str, Any], samples: Sequence[Sample] | None = None) -> None:
        """Continue from a `state()`, with the fresh `samples` it had if they were saved with it."""
        if samples is not None:
            self.samples = list(samples)
        self._refreshes = state.get("refreshes", [len(self.samples)])
        self.epoch, self.next_batch = state["epoch"], state["next_batch"]
        self.plan = self._plan_epoch()

    def _plan_epoch(self) -> list[list[list[int]]]:
        """Return this process's batches. All get the same number, or the longest would wait for ever."""
        if not self.samples:
            return []  # an on-policy run before its first refresh
        rows = max(1, self.config.batch_tokens // self.config.row_tokens)
        lengths = [len(sample) for sample in self.samples]
        batches = plan_epoch(lengths, self.config.row_tokens, rows, self.seed, self.epoch)
        shared = len(batches) // self.world
        if shared == 0:
            # Fewer batches than processes: deal out rows instead, repeating some.
            flat = [row for batch in batches for row in batch]
            return [[flat[(self.rank + i * self.world) % len(flat)] for i in range(max(1, len(flat) // self.world))]]
        return batches[self.rank : shared * self.world : self.world]
