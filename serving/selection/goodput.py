"""Selection by goodput: the drafts that are expected to bring all rows the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.serving.base.acceptance import ranked_of_source
from distillspec.serving.base.catch_up import READ_WITH_DRAFTING
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult, decoding_rows
from distillspec.serving.base.rows import RowView
from distillspec.serving.selection.accepting import domain_index, features, moved, of_domain
from distillspec.serving.selection.answer import Answer
from distillspec.serving.selection.base import Choices, SelectionParts, SelectionState, drafts_of, members_of
from distillspec.serving.selection.batch import NO_DRAFT, Batch
from distillspec.serving.selection.dominance import Dominance, kind_of
from distillspec.serving.selection.estimate import DraftsAcceptance, Tried
from distillspec.serving.selection.first_draft import FirstDrafts
from distillspec.serving.selection.free_share import FreeShare
from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.optimism import OPTIMISTIC_ANSWERS, Optimism
from distillspec.serving.selection.prospects import Prospects
from distillspec.types import Ints

LEARN_EVERY = 16  # steps whose trials are learnt from together, and between two reviews of the rows' drafts
REVIEW = 16  # tokens that a draft writes for an answer before the answer may get another one


class GoodputSelection(SelectionState):
    """Learns P(accepted) of each draft by what is known of a request, and chooses drafts by the costs of steps.

    A new request draws each draft's acceptance from its posterior and takes the draft with the most expected tokens a
    second (Thompson 1933): drafts are tried as long as they may be the best. Every `LEARN_EVERY` steps the drafts of
    all rows are chosen together again, by the rows' own trials too (see `Batch`). Sources without a model stand beside
    each draft. A row has one of them alone where no draft is worth its passes, and the reading of the row's text. Where
    a draft has collapsed, the others are tried anew at once (see `Optimism`).

    Args:
        fast_switching: the new draft reads the text in spare room of steps, and the old one drafts until it has.
        tries: False: new requests get what is expected to be best, and nothing is tried. To compare with.

    Attributes:
        draws: new answers whose draft was drawn, since the start.
        reviews: of the drafts of all rows.
    """

    def __init__(self, parts: SelectionParts, fast_switching: bool = True, tries: bool = True) -> None:
        super().__init__(parts.free)
        self.parts, self.fast_switching = parts, fast_switching
        self._acceptance = DraftsAcceptance(parts.expected, parts.most)
        self._share, self.losses = FreeShare(parts.free), Losses(0.0)
        self._optimism = Optimism(OPTIMISTIC_ANSWERS if tries else 0)
        self._prospects = Prospects(parts, self._acceptance, self._share, self._optimism)
        self._first = FirstDrafts(parts, self._acceptance, self._optimism, self._prospects)
        self._answers: dict[str, Answer] = {}
        self._reviewed_at, self._reviewed_rows = 0, 0  # the step of the last review, and how many rows it had
        self._dominance, self._surprises = Dominance(), 0
        self.draws = self.reviews = 0

    @property
    def tries(self) -> bool:
        """True if drafts are tried that are not expected to be the best. May be set."""
        return self._optimism.is_on

    @tries.setter
    def tries(self, tries: bool) -> None:
        self._optimism.lasting = OPTIMISTIC_ANSWERS if tries else 0

    def choose(self, rows: Sequence[RowView]) -> Choices:
        self._prospects.alone = len(rows) == 1
        for row in rows:
            self._keep_draft(row, rows)
        if self._review_is_due(rows):
            self._review(rows)
        running = [(row.sequence_id, self._answers.get(row.sequence_id)) for row in rows]
        answers = [(name, answer) for name, answer in running if answer is not None]
        self.beliefs = {name: answer.belief for name, answer in answers if answer.belief is not None}
        self.coming = {name: answer.coming for name, answer in answers if answer.coming}
        self.on_trial = {name for name, answer in answers if answer.loss}
        able = {row.sequence_id for row in rows if members_of(row, self.free)}
        return {name: None if answer is None or name not in able else answer.draft for name, answer in running}

    def observe(self, result: StepResult, chosen: Choices) -> None:
        views = {row.sequence_id: row for row in result.view.rows} if self.free else {}
        for row in decoding_rows(result):
            source, answer = chosen.get(row.sequence_id), self._answers.get(row.sequence_id)
            if source is None or answer is None:
                continue
            if answer.loss:
                self.losses.add(answer.loss * row.emitted)
            if self.free:
                answer.steps += 1
                answer.free_steps += self._share.saw(views[row.sequence_id], row.trials)
            if source in self.free:
                continue  # nothing is learnt of drafts
            # Also tokens tried behind rejected n-grams, since few are tried first. Such text is harder for every draft.
            trials = [trial for trial in ranked_of_source(row.trials, source) if trial.rank == 0]
            if not trials:
                continue
            accepted = sum([trial.accepted for trial in trials])
            steps, tried, before = answer.unlearnt.get(source, (0, 0, 0))
            answer.unlearnt[source] = steps + 1, tried + len(trials), before + accepted
            self._acceptance.saw(source, trials)
        alive = self.rows_to_keep(result)
        if self.steps % LEARN_EVERY == 0:
            for answer in self._answers.values():
                self._learn_from(answer)
            if (surprises := self._acceptance.surprises) != self._surprises:
                self._surprises = surprises
                self._dominance.changed()
        if alive is not None:
            self._answers = {name: answer for name, answer in self._answers.items() if name in alive}

    def _learn_from(self, answer: Answer) -> None:
        for source, (steps, tried, accepted) in answer.unlearnt.items():
            before = answer.learnt.get(source)
            self._optimism.saw(source, answer.kind, tried)
            if self._acceptance.learn(source, answer.features, steps, tried, accepted, before):
                self._leave(source)
            answer.learnt[source] = Tried.more(before, tried, accepted, answer.features)
        answer.unlearnt.clear()

    def _leave(self, source: str) -> None:
        """Let all rows be reviewed in the next step, where a draft has collapsed, and let the others be tried."""
        self.collapsed.append(source)
        self._dominance.changed()
        self._reviewed_at = self.steps - LEARN_EVERY
        for answer in self._answers.values():
            answer.prospect = None
        self._optimism.collapsed(source, self._acceptance.usual(source))

    def draft_changed(self, change: DraftChange) -> None:
        source = change.source
        self._prospects.changed(change)
        self._optimism.changed(source)
        self._dominance.changed()
        self._acceptance.changed(change)
        for answer in self._answers.values():
            answer.prospect = None
            answer.learnt.pop(source, None)
            answer.unlearnt.pop(source, None)
            if answer.draft == source:
                answer.loss = 0.0
                answer.belief = self._belief(source, answer)

    def _keep_draft(self, row: RowView, rows: Sequence[RowView]) -> None:
        """Keep a row's draft. Give a row one if its answer is new, or its draft may not draft for it."""
        answer = self._answers.get(row.sequence_id)
        if answer is not None and answer.coming is not None:
            self._arrive(row, answer)
        members = members_of(row, self.free)
        if not members or (answer is not None and answer.draft in members):
            return
        if answer is not None:
            self._learn_from(answer)
        self._answers[row.sequence_id] = self._dominant_answer(row, rows) or self._new_answer(row, rows)

    def _dominant_answer(self, row: RowView, rows: Sequence[RowView]) -> Answer | None:
        """Return a new answer with the draft that is the best for all. None: there is none, or it may not draft."""
        draft = self._dominance.draft
        if draft is None or not any(option.source == draft for option in drafts_of(row)):
            return None
        if not self._dominance.covers(kind_of(row, rows), self._acceptance.chance(draft, of_domain(row))):
            return None
        known = features(row)
        return Answer(draft, row.context_tokens, known, self._acceptance.chance(draft, known), domain_index(row))

    def _new_answer(self, row: RowView, rows: Sequence[RowView]) -> Answer:
        """Return a new answer with its first draft, drawn by what its drafts may be worth beside the others'."""
        self.draws += 1
        names = self._names(rows)
        known = features(row)
        kind = domain_index(row)
        chances = self._first.drawn_chances(row, names, known)
        self._optimism.begun(kind)
        others = [other for other in rows if other is not row and other.sequence_id in self._answers]
        beside = [self._prospects.optimistic(other, names, self._answers[other.sequence_id]) for other in others]
        able = [names.index(self._member(name)) for name in members_of(row, self.free)]
        able.sort(key=lambda index: names[index] not in self.free)  # first, where no draft is worth more than nothing
        first = self._first.best_for_all_rows(row, names, able, (beside, self._draft_indices(others, names)), chances)
        draft, mean, drawn = names[first.chosen], chances.mean[first.chosen], chances.drawn[first.chosen]
        # A draft on trial is believed in: by what is expected of it, a controller might let it draft nothing.
        belief = None if draft in self.free else max(mean, drawn) if first.lost else mean
        answer = Answer(draft, row.context_tokens, known, belief, kind, first.lost)
        answer.prospect = (names, self._prospects.alone), first.prospect
        known_best = names[first.best] not in self.free and not any(chances.optimistic)
        self._note_dominance(row, rows, names[first.best] if known_best and first.is_certain else None)
        return answer

    def _note_dominance(self, row: RowView, rows: Sequence[RowView], best: str | None) -> None:
        """Count an answer whose draft is the best for certain. None: another one may be better for it."""
        if best is None:
            self._dominance.doubted()
        else:
            self._dominance.is_certain(kind_of(row, rows), best, self._acceptance.chance(best, of_domain(row)))

    def _review_is_due(self, rows: Sequence[RowView]) -> bool:
        """Return True if drafts are to be reviewed: some steps have passed, or rows that shared a draft have left."""
        answers = [answer for row in rows if (answer := self._answers.get(row.sequence_id)) is not None]
        drafts = {answer.coming or answer.draft for answer in answers}
        if drafts <= {self._dominance.draft}:
            return False
        return self.steps >= self._reviewed_at + LEARN_EVERY or (len(rows) < self._reviewed_rows and len(drafts) > 1)

    def _review(self, rows: Sequence[RowView]) -> None:
        """Let answers switch to the drafts that are best for all rows together, if that pays."""
        names, running = self._names(rows), [row for row in rows if row.sequence_id in self._answers]
        answers = [self._answers[row.sequence_id] for row in running]
        for answer in answers:
            self._learn_from(answer)
        self._reviewed_at, self._reviewed_rows = self.steps, len(rows)
        self.reviews += 1
        for row, answer in zip(running, answers, strict=True):
            answer.features, answer.prospect = moved(answer.features, row), None
            if not answer.loss or answer.draft in answer.learnt:
                answer.belief = self._belief(answer.draft, answer)
        if len(names) < 2 or not running:
            return
        pairs = list(zip(running, answers, strict=True))
        settled = [row.context_tokens >= answer.draft_since + REVIEW for row, answer in pairs]
        drafts_now = self._draft_indices(running, names)
        batch = self._prospects.batch([self._prospects.optimistic(row, names, answer) for row, answer in pairs], names)
        best = batch.best(drafts_now, numpy.array(settled))
        drafts = [None if draft == NO_DRAFT else names[draft] for draft in best.tolist()]
        for answer, draft, may_move in zip(answers, drafts, settled, strict=True):
            if may_move:
                answer.loss = 0.0
                answer.coming_loss = 0.0
                answer.coming = None
            if draft is not None and draft != answer.draft:
                answer.coming = draft
                self._dominance.doubted()
        self._put_on_trial(pairs, names, drafts_now, best, batch)
        for row, answer in pairs:
            self._arrive(row, answer)
        self._prospects.priced(batch, best)

    def _put_on_trial(
        self,
        rows: Sequence[tuple[RowView, Answer]],
        names: Sequence[str],
        drafts_now: Ints,
        best: Ints,
        optimistic: Batch,
    ) -> None:
        """Use the optimistic acceptance of untried drafts for rows that have them or switch to them.

        Args:
            drafts_now, best: indices of the rows' drafts so far, and from now on.
            optimistic: by optimistic estimates.
        """
        on_trial = [answer for _, answer in rows if self._prospects.may_try(answer.coming or answer.draft, answer)]
        if not on_trial:
            return
        expected = self._prospects.batch([self._prospects.expected(row, names, answer) for row, answer in rows], names)
        price = expected.rate(drafts_now)
        lost = expected.rate(drafts_now, price) / expected.rate(best, price, optimistic) - 1
        for answer in on_trial:
            answer.coming_loss = max(0.0, len(drafts_now) / len(on_trial) * lost)
            if answer.coming_loss and answer.coming is None:
                answer.loss, answer.belief = answer.coming_loss, self._belief(answer.draft, answer)

    def _arrive(self, row: RowView, answer: Answer) -> None:
        """Let an answer switch to the draft that is coming, once that needs no pass of its own to read its text."""
        source = answer.coming
        unread = {option.source: option.unread_tokens for option in drafts_of(row)} | dict.fromkeys(self.free, 0)
        if source is None or source not in unread:
            answer.coming = None
        elif unread[source] <= READ_WITH_DRAFTING or not self.fast_switching:
            answer.draft = source
            answer.coming = None
            answer.draft_since = row.context_tokens
            answer.loss, answer.coming_loss = answer.coming_loss, 0.0
            answer.belief = self._belief(source, answer)

    def _belief(self, source: str, answer: Answer) -> float | None:
        """Return P(a token of a draft is accepted) by what is known of an answer, optimistic while it is on trial."""
        if source in self.free:
            return None
        chance = self._acceptance.chance(source, answer.features)
        return self._prospects.optimistic_chance(source, answer, chance) if answer.loss else chance

    def _member(self, source: str) -> str:
        """Return the member that stands for a source: of those without a model, the best for all."""
        return self._share.best if source in self.free else source

    def _names(self, rows: Sequence[RowView]) -> list[str]:
        """Return the drafts that could draft for any of these rows, and the best source without a model."""
        return list(dict.fromkeys([self._member(source) for row in rows for source in members_of(row, self.free)]))

    def _draft_indices(self, rows: Sequence[RowView], names: Sequence[str]) -> Ints:
        """Return the index of each row's draft among the names, of the one that is coming where there is one."""
        answers = [self._answers.get(row.sequence_id) for row in rows]
        drafts = [None if answer is None else self._member(answer.coming or answer.draft) for answer in answers]
        return numpy.array([NO_DRAFT if draft not in names else names.index(draft) for draft in drafts], dtype=int)
