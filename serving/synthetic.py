"""Acceptance with a set probability, for measuring speed: what a draft of that quality would gain on this machine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.serving.sampling import Judgement, TokenSampler, Window
from distillspec.serving.tree import ROOT
from distillspec.serving.verification import Verdict


class SyntheticAcceptance(TokenSampler):
    """Does all the work of verification, then lets each drafted token stand with probability `alpha`.

    Outputs mean nothing: give it to an `Engine` for benchmarks only. Along a tree the first child is the one that is
    tried. Raises ConfigError for an `alpha` outside [0, 1].
    """

    def __init__(self, vocab_size: int, device: torch.device, alpha: float, seed: int = 0) -> None:
        super().__init__(vocab_size, device, seed)
        if not 0 <= alpha <= 1:
            raise ConfigError(f"alpha={alpha} must be in [0, 1]")
        self.alpha = alpha
        self._coins = torch.Generator().manual_seed(seed)

    def verify(self, logits: Tensor, windows: Seq[Window]) -> list[Judgement]:
        """See `TokenSampler.verify`; the path of every verdict is replaced."""
        judged = super().verify(logits, windows)
        return [self._as_wished(window, judgement) for window, judgement in zip(windows, judged, strict=True)]

    def _as_wished(self, window: Window, judgement: Judgement) -> Judgement:
        if judgement.verdict is None:
            return judgement
        return replace(judgement, verdict=Verdict(self._path(window), judgement.verdict.next_token))

    def _path(self, window: Window) -> tuple[int, ...]:
        tree, path, node = window.tree, list[int](), ROOT
        while (children := tree.children.get(node)) and float(torch.rand((), generator=self._coins)) < self.alpha:
            node = children[0]
            path.append(node)
        return tuple(path)
