"""Pace of reading prompts beside rows that decode: a long prompt should not hold everybody's next token up."""

from __future__ import annotations

from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.running_mean import running_mean

LEAST = 4  # tokens. More are read once it is measured that they take hardly longer
PATIENCE_S = 1.0  # waiting prompts are read within about so long, whatever that costs the rows that decode
NEW_WEIGHT = 0.1  # of the newest step in the running means


class PrefillPace:
    """Chooses how many prompt tokens a step reads, from what the steps before took.

    Args:
        most: tokens that a step reads while nobody decodes.
        slowdown: share by which reading may lengthen a step of rows that decode. Where more requests wait than rows
            decode, the share is larger in proportion, so that few do not hold up many.
    """

    def __init__(self, most: int, slowdown: float) -> None:
        self.most, self.slowdown = most, slowdown
        self._plain_s: float | None = None  # of a step that reads no prompt
        self._token_s: float | None = None  # that a prompt's token adds

    def tokens(self, decoding: int, waiting: int, unread: int) -> int:
        """Return the tokens to read in the next step.

        Args:
            decoding: rows that decode.
            waiting: requests that have a slot, or could have one, and are not read whole.
            unread: prompt tokens of all requests that are still to be read.
        """
        if not decoding:
            return self.most
        if self._plain_s is None:
            return 0  # a step of these rows alone, to compare with: under load none comes by itself
        if self._token_s is None:
            return min(self.most, LEAST)
        spare_s = PATIENCE_S - unread * self._token_s
        if spare_s <= 0:
            return self.most
        # A step of n tokens takes plain + n · token seconds. In time: n · patience / (plain + n · token) = unread.
        in_time = unread * self._plain_s / spare_s
        share = self.slowdown * max(1.0, waiting / decoding)
        allowed = share * self._plain_s / max(self._token_s, 1e-9)
        return min(self.most, max(LEAST, int(in_time) + 1, int(allowed)))

    def observe(self, result: StepResult) -> None:
        """Learn from a step's time."""
        if not result.view.rows:
            return
        if not result.prefill_tokens:
            self._plain_s = running_mean(self._plain_s, result.total_s, NEW_WEIGHT)
        elif self._plain_s is not None:
            token_s = max(0.0, result.total_s - self._plain_s) / result.prefill_tokens
            self._token_s = running_mean(self._token_s, token_s, NEW_WEIGHT)
