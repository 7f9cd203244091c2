"""P(a draft's token is accepted) by what is known of a request, with its uncertainty: logistic regression per draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, log1p
from zlib import crc32

import numpy

from distillspec.serving.base.rows import RowView
from distillspec.serving.base.tree import LOOKUP, SUFFIX
from distillspec.types import Floats

DOMAINS, WORDS = 32, 128  # entries that domains and prompt tokens are hashed to
LONG_ANSWER = 256.0  # tokens
LONG_MATCH = 64  # tokens
PLAIN = 3  # features before the domains: a constant, and those of `progress_of`
SIZE = PLAIN + DOMAINS + WORDS
START = 0.0  # log-odds of acceptance before anything was seen
# Precision of the weights before anything was seen. There are many words, and each says little: with the precision of
# the other features they would together leave every draft in doubt for ever.
PRIOR = numpy.concatenate([numpy.full(PLAIN + DOMAINS, 3.0), numpy.full(WORDS, 30.0)])
OF_A_DRAFT = numpy.maximum(PRIOR, 8.0)  # of what one draft adds to what all have in common
LEAST_CHANCE = 0.05  # that an evaluation, or a ratio to an old draft, is believed
CORRELATED = 0.25  # weight of a trial: those of one answer are alike
MEMORY = 2000.0  # trials after which evidence has half its weight
QUICK, SURPRISE = 0.02, 4.0  # weight of a step in the recent error, and how many of its standard errors mean a change
KEPT = 0.1  # share of the evidence that is left after a change


def features(row: RowView) -> Floats:
    """Return what is known of a request `[SIZE]`: its domain, its prompt's tokens, and how far its answer has come.

    Tokens and names are hashed, so that neither vocabulary nor domains have to be known.
    """
    vector = numpy.zeros(SIZE)
    vector[0] = 1.0
    vector[1:PLAIN] = progress_of(row)
    vector[PLAIN + domain_index(row)] = 1.0
    if row.prompt:
        tokens = numpy.unique(numpy.array(row.prompt, dtype=numpy.int64))
        counts = numpy.bincount((tokens * 2654435761 >> 7) % WORDS, minlength=WORDS).astype(float)
        vector[PLAIN + DOMAINS :] = counts / numpy.linalg.norm(counts)
    return vector


def domain_index(row: RowView) -> int:
    """Return which of the `DOMAINS` entries a row's domain has."""
    return crc32(row.domain.encode()) % DOMAINS


def of_domain(row: RowView) -> Floats:
    """Return features that say of a request that it is of its domain, and no more."""
    vector = numpy.zeros(SIZE)
    vector[[0, PLAIN + domain_index(row)]] = 1.0
    return vector


def progress_of(row: RowView) -> tuple[float, float]:
    """Return the features that change while an answer grows, in [0, 1]: tokens written, and of the longest match.

    The match is that of a lookup. It counts by the logarithm of its tokens, 0 without a match.
    """
    match = max([option.match for option in row.options if option.source in (LOOKUP, SUFFIX)], default=0)
    written = row.context_tokens - len(row.prompt)
    return min(1.0, written / LONG_ANSWER), min(1.0, log1p(match) / log1p(LONG_MATCH))


def moved(known: Floats, row: RowView) -> Floats:
    """Return the features of a request whose answer has grown."""
    vector = known.copy()
    vector[1:PLAIN] = progress_of(row)
    return vector


@dataclass
class Accepting:
    """One draft's acceptance as a function of features. Weights are Gaussian, each by itself (Chapelle and Li 2011).

    Old evidence fades, for text and drafts change. Errors far beyond chance mean that they have changed at once: then
    most of the evidence goes.
    """

    weights: Floats = field(default_factory=lambda: _start(START))
    precision: Floats = field(default_factory=PRIOR.copy)
    prior: Floats = field(default_factory=PRIOR.copy)  # precision before anything was seen
    surprises: int = 0  # errors far beyond chance
    _error: float = 0.0  # moving sum of errors, and of their variance
    _variance: float = 0.0

    @classmethod
    def expecting(cls, chance: float | None) -> Accepting:
        """Return the estimate for a draft that is expected to be accepted with this chance, None: nothing is known."""
        start = START if chance is None else _log_odds(chance)
        return cls(_start(start), OF_A_DRAFT.copy(), OF_A_DRAFT)

    def log_odds(self, known: Floats) -> tuple[float, float]:
        """Return mean and standard deviation of the log-odds of acceptance."""
        return float(self.weights @ known), float((known**2 / self.precision).sum() ** 0.5)

    def chance(self, known: Floats, further: float = 0.0) -> float:
        """Return P(accepted) at the mean of the log-odds. `further`: log-odds of another estimate, added."""
        return sigmoid(float(self.weights @ known) + further)

    def learn(self, known: Floats, tried: int, accepted: int, steps: int = 1, further: float = 0.0) -> None:
        """Learn from the trials of a row in so many steps. `further`: see `chance`."""
        chance = self.chance(known, further)
        error, variance = accepted - tried * chance, tried * chance * (1 - chance)
        self._watch(error, variance, steps)
        # The gain of one observation of all trials together: with each feature's alone, many at once would overshoot.
        gain = known / self.precision
        self.weights = self.weights + CORRELATED * error / (1 + CORRELATED * variance * float(gain @ known)) * gain
        self.precision = self.prior + (self.precision - self.prior) * 0.5 ** (tried / MEMORY)
        self.precision += CORRELATED * variance * known**2

    def forget(self, share: float = 1.0) -> None:
        """Forget a share of the evidence. The means of the weights stay."""
        self.precision = self.prior + (self.precision - self.prior) * (1 - share)
        self._error = self._variance = 0.0

    def change(self, acceptance: float) -> None:
        """Go on for a draft that was replaced. `acceptance`: of the new one over that of the old one."""
        self.forget(1 - KEPT)
        before = sigmoid(float(self.weights[0]))
        self.weights[0] += _log_odds(acceptance * before) - _log_odds(before)

    def _watch(self, error: float, variance: float, steps: int) -> None:
        self._error = error + (1 - QUICK) ** steps * self._error
        self._variance = variance / CORRELATED + (1 - 2 * QUICK) ** steps * self._variance  # of correlated trials
        if abs(self._error) > SURPRISE * max(self._variance, 1.0) ** 0.5:
            self.surprises += 1
            self.forget(1 - KEPT)


def sigmoid(log_odds: float) -> float:
    """Return the probability of log-odds."""
    return 1 / (1 + exp(-log_odds)) if log_odds > 0 else 1 - 1 / (1 + exp(log_odds))


def _log_odds(chance: float) -> float:
    likely = min(max(chance, LEAST_CHANCE), 1 - LEAST_CHANCE)
    return log(likely / (1 - likely))


def _start(log_odds: float) -> Floats:
    weights = numpy.zeros(SIZE)
    weights[0] = log_odds
    return weights
