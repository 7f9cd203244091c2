"""Selection by goodput: each request gets the draft that is expected to bring it the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from random import Random

from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult, decoding_rows
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.costs.table import Floats
from distillspec.serving.selection.accepting import Accepting, features, sigmoid
from distillspec.serving.selection.base import Choices, SelectionParts, SelectionState, drafts_of
from distillspec.serving.selection.batch import Habit
from distillspec.serving.selection.prices import Prices

LEARN_EVERY = 16  # steps whose trials are learnt from together, and for which prices hold
REVIEW = 16  # tokens of an answer between two looks at its draft
STRENGTH = 30.0  # trials that the estimate by features is worth beside a request's own
LEAST_LEFT = 32  # tokens that an answer is taken to write still. As many as it has written, where those are more
BETTER = 1.03  # times the tokens a second that a draft must bring for a running answer to switch to it
MOST_LEVELS = 16


@dataclass
class Answer:
    """A running answer."""

    draft: str
    review_at: int  # tokens of its text
    known: Floats  # its features
    belief: float  # P(a token of its draft is accepted), before its own trials
    loss: float  # share of the tokens a second that the draft costs, if it is not the one expected to be best
    coming: str | None = None  # the draft that it switches to when that has read its text
    own: dict[str, tuple[int, int]] = field(default_factory=dict)  # tried and accepted tokens of each draft
    new: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # steps, and those since they were learnt from


class GoodputSelection(SelectionState):
    """Learns P(accepted) of each draft by what is known of a request, and prices drafts by the costs of steps.

    A draft that other rows have already is cheaper, since drafts run one after another (`Others`).

    A new request draws each draft's acceptance from its posterior and takes the draft with the most expected tokens a
    second (Thompson 1933): drafts are tried as long as they may be the best. A running one is looked at again every
    `REVIEW` tokens, by then with its own trials, and switches if what is left of its answer pays for reading its text.

    Args:
        fast_switching: the new draft reads the text in spare room of steps, and the old one drafts until it has.
    """

    def __init__(self, parts: SelectionParts, fast_switching: bool = True) -> None:
        super().__init__()
        self.parts, self.fast_switching = parts, fast_switching
        self._drafts: dict[str, Accepting] = {}
        self._shapes: dict[str, tuple[list[int], list[int]]] = {}  # tried and accepted, by position
        self._relative: dict[str, list[float]] = {}  # acceptance of each position over that of all
        self._answers: dict[str, Answer] = {}
        self._habits: dict[str, Habit] = {}
        self._prices = Prices(parts.latency, self._habits)

    def choose(self, rows: Sequence[RowView]) -> Choices:
        before = [self._answers.get(row.sequence_id) for row in rows]
        drafts = [None if answer is None else answer.draft for answer in before]
        blocks = frozenset([option.source for row in rows for option in row.options if option.at_once])
        self._prices.see(drafts, sum([row.context_tokens for row in rows]), blocks)
        found = {row.sequence_id: self._of(row) for row in rows}
        answers = [(row, self._answers.get(row)) for row in found]
        self.beliefs = {row: answer.belief for row, answer in answers if answer is not None}
        self.coming = {row: answer.coming for row, answer in answers if answer is not None and answer.coming}
        self.on_trial = {row: answer.loss for row, answer in answers if answer is not None and answer.loss}
        return found

    def observe(self, result: StepResult, chosen: Choices) -> None:
        for row in decoding_rows(result):
            source, answer = chosen.get(row.sequence_id), self._answers.get(row.sequence_id)
            trials = [trial for trial in row.trials if trial.source == source and trial.rank == 0]
            if source is None or answer is None or not trials:
                continue
            accepted = sum([trial.accepted for trial in trials])
            self._habits[source] = self._habits.get(source, Habit()).after(row.depth, row.emitted)
            tried, before = answer.own.get(source, (0, 0))
            answer.own[source] = tried + len(trials), before + accepted
            steps, tried, before = answer.new.get(source, (0, 0, 0))
            answer.new[source] = steps + 1, tried + len(trials), before + accepted
            tried_at, accepted_at = self._shapes.setdefault(source, ([0] * MOST_LEVELS, [0] * MOST_LEVELS))
            for trial in trials:
                if trial.depth <= MOST_LEVELS:
                    tried_at[trial.depth - 1] += 1
                    accepted_at[trial.depth - 1] += trial.accepted
        alive = self.passed(result)
        if self.steps % LEARN_EVERY == 0:
            self._learn()
        if alive is not None:
            self._answers = {name: answer for name, answer in self._answers.items() if name in alive}

    def _learn(self) -> None:
        """Learn from the trials of the last steps. Prices and positions are looked at again."""
        for answer in self._answers.values():
            self._learn_from(answer)
        self._prices.renew()
        self._relative.clear()

    def _learn_from(self, answer: Answer) -> None:
        for source, (steps, tried, accepted) in answer.new.items():
            self._draft(source).learn(answer.known, tried, accepted, steps)
        answer.new.clear()

    def draft_changed(self, change: DraftChange) -> None:
        source = change.source
        self._prices.renew()
        if (draft := self._drafts.get(source)) is not None:
            draft.change(change.acceptance)
            self._shapes.pop(source, None)
            self._relative.pop(source, None)
        for answer in self._answers.values():
            answer.own.pop(source, None)
            answer.new.pop(source, None)

    def _of(self, row: RowView) -> str | None:
        answer = self._answers.get(row.sequence_id)
        if answer is not None and answer.coming is not None:
            self._arrive(row, answer)
        if answer is not None and row.context_tokens < answer.review_at and _may(row, answer.draft):
            return answer.draft
        drafts = drafts_of(row)
        if not drafts:
            return None if answer is None else answer.draft
        if answer is None or not any(option.source == answer.draft for option in drafts):
            before = None if answer is None else answer.draft
            if answer is not None:
                self._learn_from(answer)
            self._answers[row.sequence_id] = answer = self._begun(row, drafts, before)
            self._prices.change(before, answer.draft)
        else:
            self._review(row, answer, drafts)
        answer.review_at = row.context_tokens + REVIEW
        return answer.draft

    def _begun(self, row: RowView, drafts: Sequence[Option], before: str | None) -> Answer:
        """Return a new answer with its first draft, drawn by what its drafts may be worth. It had another `before`."""
        known = features(row)
        draws = Random(f"{self.parts.seed}/{row.sequence_id}")
        expected, drawn, chances = dict[str, float](), dict[str, float](), dict[str, float]()
        for option in drafts:
            name = option.source
            chances[name] = self._chance(name, known, draws.gauss(0, 1))
            reading_s = self.parts.latency().reading_s(option.unread_tokens, name)
            expected[name] = self._after_reading(self._goodput(before, option, self._chance(name, known)), reading_s)
            drawn[name] = self._after_reading(self._goodput(before, option, chances[name]), reading_s)
        chosen = max(drawn, key=lambda source: drawn[source])
        lost = self._prices.rows * (1 - expected[chosen] / max(expected.values()))
        return Answer(chosen, 0, known, chances[chosen], min(1.0, lost))

    def _after_reading(self, rate: float, reading_s: float) -> float:
        """Return the tokens a second of all rows over an answer's least length, if all wait while a text is read."""
        return rate / (1 + rate * reading_s / (LEAST_LEFT * max(1, self._prices.rows)))

    def _review(self, row: RowView, answer: Answer, drafts: Sequence[Option]) -> None:
        """Let an answer switch to the best draft, if the rest of it pays for that."""
        if len(drafts) == 1:
            return
        options = {option.source: option for option in drafts}
        rates = {name: self._goodput(answer.draft, own, self._own(own, answer)) for name, own in options.items()}
        best = max(rates, key=lambda name: rates[name])
        option, rate, before = options[best], rates[best], rates[answer.draft]
        # All rows wait while the text is read. What this one wins is counted in seconds of all of them too.
        left = max(LEAST_LEFT, row.context_tokens - len(row.prompt))
        reading_s = self.parts.latency().reading_s(option.unread_tokens, best)
        answer.coming = None
        gain = self._prices.rows * (rate / before - 1)  # of the batch, as a share of one row's tokens
        if gain > BETTER - 1 and left * gain / before > reading_s:
            answer.coming = best
            self._arrive(row, answer)
        lost = self._prices.rows * (1 - rates[answer.draft] / rate)
        answer.loss, answer.belief = min(1.0, lost), self._chance(answer.draft, answer.known)

    def _arrive(self, row: RowView, answer: Answer) -> None:
        """Let an answer switch to the draft that is coming, once that needs no pass of its own to read its text."""
        option = next((own for own in drafts_of(row) if own.source == answer.coming), None)
        if option is None:
            answer.coming = None
        elif option.unread_tokens <= ALONG or not self.fast_switching:
            self._prices.change(answer.draft, option.source)
            answer.draft, answer.coming = option.source, None
            answer.belief = self._chance(answer.draft, answer.known)

    def _chance(self, source: str, known: Floats, drawn: float | None = None) -> float:
        """Return P(accepted) by what is known of a request. `drawn`: so many deviations from the mean."""
        if drawn is None:
            return self._draft(source).chance(known)
        mean, deviation = self._draft(source).log_odds(known)
        return sigmoid(mean + drawn * deviation)

    def _own(self, option: Option, answer: Answer) -> float:
        """Return P(accepted) of a draft for an answer, its own trials counted in."""
        tried, accepted = answer.own.get(option.source, (0, 0))
        return (accepted + STRENGTH * self._chance(option.source, answer.known)) / (tried + STRENGTH)

    def _goodput(self, before: str | None, option: Option, chance: float) -> float:
        """Return the tokens a second of all rows, if a row has this draft in place of the one before."""
        shares = self._by_position(option.source)[: option.limit]
        survival = list(accumulate([min(1.0, chance * share) for share in shares], mul))
        return self._prices.goodput(before, option, survival, self.parts.fixed_length)

    def _by_position(self, source: str) -> list[float]:
        """Return the acceptance of each position over that of all."""
        if source not in self._relative:
            tried, accepted = self._shapes.get(source, ([0] * MOST_LEVELS, [0] * MOST_LEVELS))
            mean = (sum(accepted) + 1.0) / (sum(tried) + 2.0)
            self._relative[source] = [
                (right + STRENGTH * mean) / (count + STRENGTH) / mean
                for right, count in zip(accepted, tried, strict=True)
            ]
        return self._relative[source]

    def _draft(self, source: str) -> Accepting:
        if source not in self._drafts:
            self._drafts[source] = Accepting.expecting(self.parts.expected.get(source))
        return self._drafts[source]


def _may(row: RowView, source: str) -> bool:
    """Return True if a draft may draft for the row, or nothing may."""
    if not row.limit or row.source == source:
        return True
    return any(own.source == source and own.limit for own in row.others)
