"""Fall of a draft: it was accepted, and in answer after answer it is accepted no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

import numpy

from distillspec.serving.selection.accepting import sigmoid
from distillspec.types import Floats

FALLEN = 0.05  # P(a token is accepted) of a draft that has collapsed
USUAL, MOST = 0.2, 0.9  # the least that is expected where a draft can collapse, and the most that is believed of one
OF_AN_ANSWER = 6.0  # the most that one answer tells, for or against: texts differ, and the tokens of one are alike
SURE, SURER = 15.0, 2  # what three answers tell, and how often this doubles with each collapse before
JUDGED = 64  # tokens of a draft that has collapsed, by which it is judged again


@dataclass
class Fall:
    """Watches one draft, by the cumulative sum of what answers tell (Page 1954).

    An answer tells the logarithm of a ratio: how likely its trials are for a draft that has collapsed, over how likely
    they are by what was known before the sum began to rise. A sound answer takes back what a bad one told. So a text
    that is hard for a draft does not look like a collapse, but three more of them than sound ones do.

    Attributes:
        has_fallen: until it is accepted again.
        text, own: weights before the sum began to rise, of what drafts have in common and of what this one adds.
        usual: P(a token is accepted) by them, where the collapse was seen.
    """

    has_fallen: bool = False
    text: Floats = field(default_factory=lambda: numpy.zeros(0))
    own: Floats = field(default_factory=lambda: numpy.zeros(0))
    usual: float = 0.0
    _told: float = 0.0
    _before: int = 0  # collapses
    _tried: int = 0  # since the last one
    _accepted: int = 0

    def expects(self, text: Floats, own: Floats) -> None:
        """Take what is known now for what was known before a collapse, while nothing tells of one."""
        if not self._told and not self.has_fallen:
            self.text, self.own = text, own

    def saw(self, known: Floats, tried: int, accepted: int, before: tuple[int, int] = (0, 0)) -> bool:
        """Count trials of an answer. Return True if the draft has collapsed, the first time that this is seen.

        Args:
            known: features of the answer.
            before: its earlier tokens, tried and accepted.
        """
        if self.has_fallen:
            self._rise(tried, accepted)
            return False
        usual = min(MOST, sigmoid(float((self.text + self.own) @ known)))
        if usual < USUAL:
            return False
        further = _told(usual, before[0] + tried, before[1] + accepted) - _told(usual, *before)
        self._told = max(0.0, self._told + further)
        if self._told < SURE * 2 ** min(self._before, SURER):
            return False
        self.has_fallen, self.usual, self._told = True, usual, 0.0
        self._before += 1
        self._tried = self._accepted = 0
        return True

    def _rise(self, tried: int, accepted: int) -> None:
        """Judge it again, as a draft that has collapsed."""
        self._tried += tried
        self._accepted += accepted
        if self._tried >= JUDGED:
            self.has_fallen = self._accepted < USUAL * self._tried
            self._tried = self._accepted = 0


def _told(usual: float, tried: int, accepted: int) -> float:
    """Return the logarithm of how much likelier trials are for a draft that has collapsed than for a usual one."""
    ratio = accepted * log(FALLEN / usual) + (tried - accepted) * log((1 - FALLEN) / (1 - usual))
    return max(-OF_AN_ANSWER, min(OF_AN_ANSWER, ratio))
