"""Test for a collapse of a draft: it was accepted, and in answer after answer it is accepted no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

import numpy

from distillspec.serving.selection.accepting import sigmoid
from distillspec.types import Floats

COLLAPSED_ACCEPTANCE = 0.05  # P(a token is accepted) of a draft that has collapsed
# P(a token is accepted): the least that is expected of a draft that can collapse, and the most that is believed.
LEAST_USUAL, MOST_USUAL = 0.2, 0.9
MOST_ANSWER_NATS = 6.0  # that one answer tells, for or against: texts differ, and the tokens of a text are alike
# What three answers tell is enough. The threshold doubles with each earlier collapse, at most this often.
COLLAPSE_NATS, MOST_DOUBLINGS = 15.0, 2
RETEST_TOKENS = 64  # of a draft that has collapsed, by which it is judged again


@dataclass
class CollapseTest:
    """Watches one draft, by the cumulative sum of what answers tell (Page 1954).

    An answer tells the logarithm of a ratio: how likely its trials are for a draft that has collapsed, over how likely
    they are by what was known before the sum began to rise. A sound answer takes back what a bad one told. So a text
    that is hard for a draft does not look like a collapse, but three more of them than sound ones do.

    Attributes:
        has_collapsed: until it is accepted again.
        text_weights, draft_weights: of what drafts have in common, and of what this one adds, before the sum rose.
        usual: P(a token is accepted) by them, where the collapse was seen.
    """

    has_collapsed: bool = False
    text_weights: Floats = field(default_factory=lambda: numpy.zeros(0))
    draft_weights: Floats = field(default_factory=lambda: numpy.zeros(0))
    usual: float = 0.0
    _nats: float = 0.0  # the sum
    _collapses: int = 0
    _tried: int = 0  # since the last collapse
    _accepted: int = 0

    def expects(self, text_weights: Floats, draft_weights: Floats) -> None:
        """Remember what is known now as what was known before a collapse, while nothing points to one."""
        if not self._nats and not self.has_collapsed:
            self.text_weights, self.draft_weights = text_weights, draft_weights

    def saw(self, known: Floats, tried: int, accepted: int, before: tuple[int, int] = (0, 0)) -> bool:
        """Count trials of an answer. Return True if the draft has collapsed, the first time that this is seen.

        Args:
            known: features of the answer.
            before: its earlier tokens, tried and accepted.
        """
        if self.has_collapsed:
            self._retest(tried, accepted)
            return False
        usual = min(MOST_USUAL, sigmoid(float((self.text_weights + self.draft_weights) @ known)))
        if usual < LEAST_USUAL:
            return False
        earlier_nats = _evidence_nats(usual, *before)
        whole_nats = _evidence_nats(usual, before[0] + tried, before[1] + accepted)
        self._nats = max(0.0, self._nats + (whole_nats - earlier_nats))
        if self._nats < COLLAPSE_NATS * 2 ** min(self._collapses, MOST_DOUBLINGS):
            return False
        self.has_collapsed, self.usual = True, usual
        self._nats = 0.0
        self._collapses += 1
        self._tried = self._accepted = 0
        return True

    def _retest(self, tried: int, accepted: int) -> None:
        """Judge it again, as a draft that has collapsed."""
        self._tried += tried
        self._accepted += accepted
        if self._tried >= RETEST_TOKENS:
            self.has_collapsed = self._accepted < LEAST_USUAL * self._tried
            self._tried = self._accepted = 0


def _evidence_nats(usual: float, tried: int, accepted: int) -> float:
    """Return the logarithm of how much likelier trials are for a draft that has collapsed than for a usual one."""
    collapsed = COLLAPSED_ACCEPTANCE
    ratio = accepted * log(collapsed / usual) + (tried - accepted) * log((1 - collapsed) / (1 - usual))
    return max(-MOST_ANSWER_NATS, min(MOST_ANSWER_NATS, ratio))
