"""Tokens that choices of drafts are estimated to have cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Losses:
    """Sums since the start. None: the selection does not estimate it.

    Attributes:
        trials: tokens that trials have cost all rows, in place of the drafts that were expected to be best.
        regret: tokens that all choices have cost, against the draft of the most tokens a second for every row.
    """

    trials: float | None = None
    regret: float | None = None

    def add(self, trials: float, regret: float | None = None) -> None:
        """Add tokens, to the regret too where it is estimated."""
        self.trials = (self.trials or 0.0) + trials
        if regret is not None:
            self.regret = (self.regret or 0.0) + regret


def share_lost(lost: float, written: float) -> float:
    """Return the share of tokens a second that was lost, in [0, 1): of all that would have been written meanwhile.

    Args:
        lost: tokens.
        written: tokens, 0 before any.
    """
    return lost / (written + lost) if lost else 0.0
