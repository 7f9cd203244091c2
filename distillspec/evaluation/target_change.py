"""Change of a target that trained with its heads (Medusa-2): its quality beside the old one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import kl_div

from distillspec.evaluation.states import TargetStates
from distillspec.types import Sample


@dataclass(frozen=True)
class TargetChange:
    """Means over the tokens of the old target's held-out answers, in nats a token."""

    tokens: int
    old_nll: float  # of the answers under the old target
    new_nll: float  # under the new one
    kl: float  # KL(old ‖ new)
    agreement: float  # share of tokens at which both have the same most probable one

    def line(self) -> str:
        """Return one line for people."""
        return (
            f"the target trained too: on {self.tokens} tokens of the old one's answers, negative log-likelihood "
            f"{self.old_nll:.4f} → {self.new_nll:.4f} nats a token, KL {self.kl:.4f}, the same most probable token "
            f"{self.agreement:.1%}"
        )


@torch.no_grad()
def target_change(old: TargetStates, new: TargetStates, samples: Sequence[Sample]) -> TargetChange:
    """Compare two targets of one vocabulary on the old one's answers."""
    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    for sample in samples:
        before, after = (
            torch.log_softmax(states.target.head.logits(states.hidden(sample)).float(), -1) for states in (old, new)
        )
        labels = torch.tensor(sample.response_ids, device=before.device)[:, None]
        kl = kl_div(after, before, log_target=True, reduction="sum")
        same = (before.argmax(-1) == after.argmax(-1)).sum()
        parts = (-before.gather(1, labels).sum(), -after.gather(1, labels).sum(), kl, same)
        sums += torch.tensor([float(part) for part in parts], dtype=torch.float64)
        tokens += len(sample.response_ids)
    return TargetChange(tokens, *(sums / max(tokens, 1)).tolist())
