"""Samples that others wrote, judged by the target on their way to disk."""

from __future__ import annotations

from distillspec.data.collect import score
from distillspec.data.shards import ShardWriter
from distillspec.models.language_model import LanguageModel
from distillspec.types import Sample, SignalRequest


class ScoringWriter:
    """Hands samples on to `writer` with the target's signal, `lot` at a time."""

    def __init__(
        self, writer: ShardWriter, target: LanguageModel, signal: SignalRequest, seed: int, lot: int = 32
    ) -> None:
        self.writer, self.target, self.signal, self.seed, self.lot = writer, target, signal, seed, lot
        self._waiting: list[Sample] = []

    @property
    def done_ids(self) -> set[str]:
        return self.writer.done_ids

    def add(self, sample: Sample) -> None:
        self._waiting.append(sample)
        if len(self._waiting) >= self.lot:
            self._hand_on()

    def flush(self, *, complete: bool = False) -> None:
        self._hand_on()
        self.writer.flush(complete=complete)

    def _hand_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            for sample in score(waiting, self.target, self.signal, self.seed):
                self.writer.add(sample)
