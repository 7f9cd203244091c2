"""Acceptance with a set probability, to benchmark the speed that a draft of that quality would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.serving.base.tree import ROOT
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.decoding.verdict import Judgement, TreeVerdict
from distillspec.serving.decoding.windows import VerificationWindow


class SyntheticAcceptance(TokenSampler):
    """Does all the work of verification, then accepts each drafted token with probability `alpha`.

    Outputs mean nothing, so it is for benchmarks only. In a tree only first children are tried.

    Raises:
        ConfigError: `alpha` is outside [0, 1].
    """

    def __init__(self, vocab_size: int, device: torch.device, alpha: float, seed: int = 0) -> None:
        super().__init__(vocab_size, device, seed)
        if not 0 <= alpha <= 1:
            raise ConfigError(f"alpha={alpha} must be in [0, 1]")
        self.alpha = alpha
        self._coins = torch.Generator().manual_seed(seed)

    def verify(self, logits: Tensor, windows: Sequence[VerificationWindow]) -> list[Judgement]:
        """Verify as `TokenSampler.verify` does, then replace the path of every verdict."""
        judgements = super().verify(logits, windows)
        return [self._replaced(window, judgement) for window, judgement in zip(windows, judgements, strict=True)]

    def _replaced(self, window: VerificationWindow, judgement: Judgement) -> Judgement:
        if judgement.verdict is None:
            return judgement
        return replace(judgement, verdict=TreeVerdict(self._path(window), judgement.verdict.next_token))

    def _path(self, window: VerificationWindow) -> tuple[int, ...]:
        tree = window.tree
        path: list[int] = []
        node = ROOT
        while (children := tree.children.get(node)) and float(torch.rand((), generator=self._coins)) < self.alpha:
            node = children[0]
            path.append(node)
        return tuple(path)
