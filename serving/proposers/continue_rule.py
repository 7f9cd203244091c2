"""Rules that decide during drafting which rows go on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.stop_head import StopHead
from distillspec.serving.base.transfer import to_host


class ContinueRule(Protocol):
    """Decides after every draft step which rows continue."""

    def keeps(self, logits: Tensor, carried: Tensor) -> list[bool]:
        """Return which rows continue behind the tokens that were taken from these logits.

        Args:
            logits: `[B, width]` raw, of the rows still drafting.
            carried: `[B, D]` last states of the draft, that they were computed from.
        """
        ...


class ConfidenceThreshold:
    """Draft on while the draft's best probability exceeds a threshold (SmartSpec, Algorithm 3)."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def keeps(self, logits: Tensor, carried: Tensor) -> list[bool]:
        return to_host(torch.softmax(logits.float(), -1).amax(-1) > self.threshold).tolist()


class PredictedAcceptance:
    """Draft on while the acceptance of the last token, as its `StopHead` predicts it, exceeds a threshold."""

    def __init__(self, draft: LanguageModel, head: StopHead, threshold: float) -> None:
        self.draft, self.head, self.threshold = draft, head, threshold

    def keeps(self, logits: Tensor, carried: Tensor) -> list[bool]:
        return to_host(self.head.acceptance(self.draft.normed(carried), logits) > self.threshold).tolist()


def accepted_prefix(predicted: Tensor, least_acceptance: float) -> Tensor:
    """Return `[B, count]` bool: False from the first position on that is expected to be rejected.

    Args:
        predicted: `[B, count]` float32, the probability of each position's token being accepted.
        least_acceptance: positions of this probability, or a lower one, count as rejected.
    """
    return (predicted > least_acceptance).long().cumprod(1).bool()
