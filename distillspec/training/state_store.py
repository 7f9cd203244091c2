"""The target's states of training text, for drafts that read them: computed once and kept as far as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.features import read_states
from distillspec.models.memory import free_bytes
from distillspec.types import RecordedStates, Sample, StateRequest

log = logging.getLogger(__name__)

SHARE = 1 / 3  # of the free memory, at most
GIB = 1 << 30
Key = tuple[tuple[int, ...], tuple[int, ...]]


class StateStore:
    """States of samples, on the CPU: recorded with the text, or computed at the first use.

    What has no room is computed again at every use.

    Args:
        ids: states that the draft reads.
        gib: memory to use. None: a third of what is free.
        precision: of what is computed here.
        processes: of this run, which share the memory.
        held: bytes of `gib` that recorded states take already, in this process.
    """

    def __init__(
        self,
        target: LanguageModel,
        ids: Sequence[int],
        gib: float | None = None,
        precision: str = "bf16",
        processes: int = 1,
        held: float = 0,
    ) -> None:
        self.target, self.request = target, StateRequest(tuple(ids), precision)
        self.room = max(0.0, state_room(gib, processes) - (0 if gib is None else held))
        self._width = int(target.model.config.get_text_config().hidden_size)
        self._known: dict[Key, RecordedStates] = {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the states of one token take."""
        return self.request.bytes_per_token(self._width)

    def describe(self, samples: Sequence[Sample]) -> str:
        """Return one line about the memory that the states of `samples` take."""
        size = f"{self.bytes_per_token / 1000:.1f} kB a token"
        about = f"the draft reads the target's states {list(self.request.ids)}: {size}"
        if not samples:
            return f"{about} of the text that is yet to be written"
        needed = sum(len(sample) for sample in samples) * self.bytes_per_token
        recorded = sum(len(sample) for sample in samples if self._recorded(sample) is not None) * self.bytes_per_token
        kept = "kept in memory"
        if needed - recorded > self.room:
            kept = f"{(recorded + self.room) / needed:.0%} kept, others computed at each use"
        elif recorded:
            kept = f"{recorded / needed:.0%} recorded with the text"
        return f"{about}, {needed / GIB:.2f} GiB in all, {kept}"

    def rows(self, rows: Sequence[Sequence[Sample]], width: int) -> Tensor:
        """Return the states `[B, width, F]` bfloat16 of samples laid out in rows, as `collate` does."""
        recorded_states = {_key(sample): self._recorded(sample) for row in rows for sample in row}
        self._read([s for row in rows for s in row if recorded_states[_key(s)] is None and _key(s) not in self._known])
        states = torch.zeros(len(rows), width, len(self.request.ids) * self._width, dtype=torch.bfloat16)
        for r, row in enumerate(rows):
            start = 0
            for sample in row:
                key = _key(sample)
                recorded = recorded_states[key]
                values = self._known[key].of(self.request.ids) if recorded is None else recorded
                assert values is not None, "they were made for these ids"
                states[r, start : start + len(values)] = values
                start += len(sample)
        self._trim()
        return states

    def _recorded(self, sample: Sample) -> Tensor | None:
        """Return the states `[L − 1, F]` that came with the text, if they are those."""
        return None if sample.states is None else sample.states.of(self.request.ids)

    def keep(self, samples: Sequence[Sample]) -> None:
        """Forget the states of all text but these samples'."""
        wanted = {_key(sample) for sample in samples}
        self._known = {key: states for key, states in self._known.items() if key in wanted}

    def _read(self, samples: Sequence[Sample]) -> None:
        """Compute the states of samples, each by itself: the last bits of a packed one depend on what is beside it.

        A resumed run may meet a text beside others than the run that was interrupted did.
        """
        for sample in {_key(sample): sample for sample in samples}.values():
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=self.target.device)
            places = torch.arange(len(sample), device=self.target.device)[None]
            self._known[_key(sample)] = self.request.record(read_states(self.target, ids, places, self.request.ids)[0])

    def _trim(self) -> None:
        """Forget the newest states that exceed the memory: older ones are needed as soon."""
        excess = sum(states.nbytes for states in self._known.values()) - self.room
        while excess > 0 and self._known:
            _, states = self._known.popitem()
            excess -= states.nbytes


def state_room(gib: float | None, processes: int = 1) -> float:
    """Return the bytes that states may take in each process of a run: `gib` in all, or a third of the free memory."""
    free = free_bytes(torch.device("cpu"))
    return (gib * GIB if gib is not None else SHARE * (free or 0)) / processes


def _key(sample: Sample) -> Key:
    return sample.prompt_ids, sample.response_ids
