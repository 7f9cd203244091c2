"""Samples of other writers, scored by the target on their way to disk."""

from __future__ import annotations

from distillspec.data.collect import score
from distillspec.data.shards import ShardWriter
from distillspec.models.language_model import LanguageModel
from distillspec.signals import SignalRequest
from distillspec.types import Sample


class ScoringWriter:
    """Writer that adds the target's signal to samples, `batch_size` at a time, and passes them to `writer`.

    Args:
        at_flush: score at `flush` alone. A target that writes the text can read none by itself before its generator
            has ended (`sample_responses` with `lot`).
    """

    def __init__(
        self,
        writer: ShardWriter,
        target: LanguageModel,
        signal: SignalRequest,
        seed: int,
        batch_size: int = 32,
        *,
        at_flush: bool = False,
    ) -> None:
        self.writer = writer
        self.target = target
        self.signal = signal
        self.seed = seed
        self.batch_size = batch_size
        self.at_flush = at_flush
        self.waiting: list[Sample] = []

    @property
    def done_ids(self) -> set[str]:
        return self.writer.done_ids

    def add(self, sample: Sample) -> None:
        self.waiting.append(sample)
        if len(self.waiting) >= self.batch_size and not self.at_flush:
            self._score_waiting()

    def flush(self, *, complete: bool = False) -> None:
        self._score_waiting()
        self.writer.flush(complete=complete)

    def _score_waiting(self) -> None:
        while self.waiting:
            batch, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
            for sample in score(batch, self.target, self.signal, self.seed):
                self.writer.add(sample)
