"""Rules that decide during drafting which rows go on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distillspec.serving.base.transfer import to_host


class ContinueRule(Protocol):
    """Decides after every draft step which rows continue."""

    def keeps(self, logits: Tensor, step: int) -> list[bool]:
        """Return which rows continue.

        Args:
            logits: `[B, width]` raw, of the rows still drafting.
            step: the draft token (0, 1, …) that was taken from them.
        """
        ...


class ConfidenceThreshold:
    """Draft on while the draft's best probability exceeds a threshold (SmartSpec, Algorithm 3)."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keeps(self, logits: Tensor, step: int) -> list[bool]:
        return to_host(torch.softmax(logits.float(), -1).amax(-1) > self.threshold).tolist()


def likely(predicted: Tensor, surer_than: float) -> Tensor:
    """Return `[B, count]` bool: False from the first position on that is expected to be rejected.

    Args:
        predicted: `[B, count]` float32, the probability of each position's token being accepted.
        surer_than: at most this probability counts as rejected.
    """
    return (predicted > surer_than).long().cumprod(1).bool()
