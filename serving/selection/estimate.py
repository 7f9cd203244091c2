"""Acceptance of several drafts: what their texts have in common, what each draft adds, and how it falls by position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy

from distillspec.serving.base.acceptance import Trial
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.selection.accepting import KEPT, Accepting, sigmoid
from distillspec.serving.selection.collapse_test import CollapseTest
from distillspec.types import Floats

STRENGTH = 30.0  # trials that the estimate by features is worth beside a request's own
ALIKE = 0.35  # share of the surprise in a request's trials of other drafts that holds for a draft too
MOST_OFFSET = 1.0  # log-odds


class Tried(NamedTuple):
    """Tokens of one draft that a request has tried."""

    tried: int
    accepted: int
    known: Floats  # features under which they were tried, their mean

    @classmethod
    def more(cls, before: Tried | None, tried: int, accepted: int, known: Floats) -> Tried:
        """Return the same with further tokens, that were tried under one set of features."""
        if before is None or not before.tried:
            return cls(tried, accepted, known)
        share = tried / (before.tried + tried)
        mean = before.known + share * (known - before.known)
        return cls(before.tried + tried, before.accepted + accepted, mean)


class DraftsAcceptance:
    """P(a token is accepted) of each draft, by the features of a request.

    Text that is hard for one draft is hard for all: what they have in common is told apart from what each adds. A draft
    that collapses says nothing of the text (see `CollapseTest`).

    Args:
        expected: α of drafts by their own evaluation, as far as it is known.
        most: the longest chain.
    """

    def __init__(self, expected: Mapping[str, float], most: int) -> None:
        self.expected, self.most = expected, most
        self._common = Accepting()
        self._drafts: dict[str, Accepting] = {}
        self._collapse_tests: dict[str, CollapseTest] = {}
        self._positions: dict[str, Floats] = {}  # tried and accepted `[2, most]`
        self._relative: dict[str, Floats] = {}  # acceptance of each position over that of all

    def log_odds(self, source: str, known: Floats) -> tuple[float, float]:
        """Return the mean log-odds of acceptance, and the standard deviation of what the draft adds to them."""
        mean, deviation = self._draft(source).log_odds(known)
        return self._common.log_odds(known)[0] + mean, deviation

    def chance(self, source: str, known: Floats) -> float:
        """Return P(accepted) at the mean of the log-odds."""
        return sigmoid(self.log_odds(source, known)[0])

    def chances(self, known: Floats, own_trials: Mapping[str, Tried], sources: Sequence[str]) -> list[float]:
        """Return P(accepted) of each draft for a request with trials of its own.

        Trials of the other drafts count in part: a text may be harder for all of them. Trials are compared with what
        was expected when they were made, perhaps earlier in the answer.
        """
        expected = {name: self.log_odds(name, trials.known)[0] for name, trials in own_trials.items()}
        misses, doubts = dict[str, float](), dict[str, float]()
        for name, (tried, accepted, _) in own_trials.items():
            if self._collapse_test(name).has_collapsed:
                continue
            chance = sigmoid(expected[name])
            misses[name], doubts[name] = accepted - tried * chance, tried * chance * (1 - chance)
        chances = []
        for name in sources:
            miss = sum(misses.values()) - misses.get(name, 0.0)
            doubt = sum(doubts.values()) - doubts.get(name, 0.0)
            offset = max(-MOST_OFFSET, min(MOST_OFFSET, ALIKE * miss / (doubt + STRENGTH / 4)))
            chance = sigmoid(self.log_odds(name, known)[0] + offset)
            if (trials := own_trials.get(name)) is not None:
                surprise = trials.accepted - trials.tried * sigmoid(expected[name] + offset)
                chance = max(0.0, min(1.0, chance + surprise / (trials.tried + STRENGTH)))
            chances.append(chance)
        return chances

    @property
    def surprises(self) -> int:
        """Return how often acceptance was far from what was expected, since the start."""
        return self._common.surprises + sum([draft.surprises for draft in self._drafts.values()])

    def relative(self, source: str) -> Floats:
        """Return the acceptance of each position over that of all `[most]`."""
        if source not in self._relative:
            tried, accepted = self._positions.get(source, numpy.zeros((2, self.most)))
            mean = (accepted.sum() + 1) / (tried.sum() + 2)
            self._relative[source] = (accepted + STRENGTH * mean) / (tried + STRENGTH) / mean
        return self._relative[source]

    def survival(self, source: str, chance: float) -> Floats:
        """Return P(the first 1 … `most` tokens are all accepted), where `chance` is the mean P(a token is accepted)."""
        return numpy.minimum(1.0, chance * self.relative(source)).cumprod()

    def learn(
        self, source: str, known: Floats, steps: int, tried: int, accepted: int, before: Tried | None = None
    ) -> bool:
        """Learn from the trials of a request in so many steps. Return True if the draft is seen to have collapsed.

        Args:
            before: the draft's earlier trials of the request.
        """
        draft, test = self._draft(source), self._collapse_test(source)
        test.expects(self._common.weights, draft.weights)
        collapsed = test.saw(known, tried, accepted, (0, 0) if before is None else before[:2])
        if collapsed:
            self._blame(source)
        if not test.has_collapsed:
            self._common.learn(known, tried, accepted, steps, draft.log_odds(known)[0])
        draft.learn(known, tried, accepted, steps, self._common.log_odds(known)[0])
        self._relative.pop(source, None)
        return collapsed

    def usual(self, source: str) -> float:
        """Return P(accepted) of a draft before it collapsed."""
        return self._collapse_test(source).usual

    def saw(self, source: str, trials: Iterable[Trial]) -> None:
        """Count trials by their positions. `survival` follows once the draft has learnt."""
        counts = self._positions.setdefault(source, numpy.zeros((2, self.most)))
        for trial in trials:
            if trial.depth <= self.most:
                counts[:, trial.depth - 1] += 1, trial.accepted

    def changed(self, change: DraftChange) -> None:
        """Go on for a draft that was replaced. The old one's trials say nothing of a new draft."""
        self._collapse_tests.pop(change.source, None)
        if change.acceptance is None:
            self._drafts.pop(change.source, None)
        elif (draft := self._drafts.get(change.source)) is not None:
            draft.change(change.acceptance)
        self._positions.pop(change.source, None)
        self._relative.pop(change.source, None)

    def _draft(self, source: str) -> Accepting:
        if source not in self._drafts:
            self._drafts[source] = Accepting.expecting(self.expected.get(source))
        return self._drafts[source]

    def _collapse_test(self, source: str) -> CollapseTest:
        return self._collapse_tests.setdefault(source, CollapseTest())

    def _blame(self, source: str) -> None:
        """Blame a draft that has collapsed for what the text was blamed for, and doubt what is known of all drafts.

        The others were perhaps not tried for long. Meanwhile they were taken to be as bad as the text seemed.
        """
        draft, text_weights = self._draft(source), self._collapse_tests[source].text_weights
        draft.weights = draft.weights + (self._common.weights - text_weights)
        self._common.weights = text_weights
        self._common.forget(0.0)  # all but the errors
        for each in self._drafts.values():
            each.forget(1 - KEPT)
