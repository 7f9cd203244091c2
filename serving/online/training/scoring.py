"""Scoring in the trainer's process: both drafts of a question read the answers that neither has learnt from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch

from distillspec.config import GateConfig
from distillspec.errors import ConfigError, RunError, in_one_line, is_out_of_memory
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel
from distillspec.models.memory import free_unused
from distillspec.sampling import NonFiniteLogits
from distillspec.serving.online.judging.logged_score import logged_score, nothing_accepted, target_score
from distillspec.serving.online.judging.question import Question, open_questions
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.records import LogEntry, LoggedAnswer
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.database import DatabaseFailed
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.base_drafts import BaseDrafts

log = logging.getLogger(__name__)

SCORE_BATCH = 4  # answers. The trainer looks for an end, and for other work, in between
# Beside a busy engine. Two threads need a third more time in all, wait for each other while they spin, and the engine's
# threads for them.
THREADS = 1
EXPECTED = (ConfigError, RunError, ValueError, OSError)  # raised by a damaged or foreign draft
REST_S = 600.0  # for which a suspicion waits after memory did not suffice for it


class Scorer:
    """Scores the drafts of the open questions, a few answers at a time."""

    def __init__(
        self,
        config: GateConfig,
        replay: ReplayLog,
        registry: VersionRegistry,
        table: ScoreTable,
        drafts: BaseDrafts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.replay = replay
        self.registry = registry
        self.table = table
        self._drafts, self._clock = drafts, clock
        self._rests_until_s: dict[str, float] = {}  # by suspected version
        self._loaded: dict[str, LanguageModel] = {}  # by version, of the question at work, while there is one

    def work(self, suspected: bool) -> int:
        """Score some answers of the first question that has any left. Return how many were read."""
        threads = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            return self._work(suspected)
        finally:
            torch.set_num_threads(threads)

    def _work(self, suspected: bool) -> int:
        questions = open_questions(self.registry, suspected)
        for question in questions:
            todo = self._unscored(question)
            if todo:
                return self._read(question, todo[:SCORE_BATCH])
        if not questions:
            self._loaded.clear()
        return 0

    def finish(self, question: Question) -> None:
        """Score all answers of a question."""
        while todo := self._unscored(question):
            self._read(question, todo[:SCORE_BATCH])

    def is_stuck(self, question: Question) -> bool:
        """Return True if nothing more is read for a question now: a draft cannot be scored, or there is no memory."""
        version = question.version
        if any(self.table.problem(name) for name in (version.name, question.against.name)):
            return True
        if version.status == "candidate":
            return self.table.shortage(version.name) is not None
        return self._clock() < self._rests_until_s.get(version.name, 0.0)

    def _unscored(self, question: Question) -> list[LogEntry]:
        """Return the answers that one of both drafts has not read, none if the question is stuck."""
        if self.is_stuck(question):
            return []
        first, second = (self.table.of(name) for name in (question.version.name, question.against.name))
        unseen = question.unseen(self.replay, self.config.requests)
        return [entry for entry in unseen if entry.number not in first or entry.number not in second]

    def _read(self, question: Question, entries: list[LogEntry]) -> int:
        """Score answers, one by one where there is no memory for all. Return how many were read.

        Without memory for one, the question is given up.
        """
        if self._try(question, entries) is None:
            return len(entries)
        for read, entry in enumerate(entries):
            if (problem := self._try(question, [entry])) is not None:
                self._give_up(question.version, problem)
                return read
        return len(entries)

    def _try(self, question: Question, entries: list[LogEntry]) -> str | None:
        """Score answers. Without memory for that, drop all drafts and return the reason."""
        try:
            self._score(question, entries)
            return None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = f"there is no memory to judge it: {in_one_line(error)}"
        self._loaded.clear()
        free_unused()  # after the error, which held the memory
        return problem

    def _give_up(self, version: Version, reason: str) -> None:
        """Leave a candidate unjudged, so that learning goes on. A suspicion stays, and is looked into later."""
        log.warning("%s: %s", version.name, reason)
        if version.status == "candidate":
            self.table.give_up(version.name, reason)
        else:
            self._rests_until_s[version.name] = self._clock() + REST_S

    def _score(self, question: Question, entries: list[LogEntry]) -> None:
        """Score answers under both drafts. One that cannot be scored is refused. If both cannot, it is not their fault.

        Raises:
            ConfigError, RunError, ValueError, OSError: neither can be scored.
        """
        by_number = self.replay.by_number(entries)
        answers = {entry.number: by_number.get(entry.number) for entry in entries}  # None: deleted
        states: TargetStates | None = None
        failures: dict[str, Exception] = {}
        for version in (question.version, question.against):
            try:
                draft = self._draft(version, question)
                states = states or self._states(draft)  # the second draft reads what the first one has read
                self.table.add(version.name, self._scores(version, draft, answers, states))
            except DatabaseFailed:  # says nothing of the draft
                raise
            except EXPECTED as error:
                if is_out_of_memory(error):  # of a target that did not fit, for example
                    raise
                failures[version.name] = error
        if len(failures) > 1:
            raise failures[question.version.name]
        for name, failure in failures.items():
            self.table.refuse(name, f"it cannot be judged: {in_one_line(failure)}")

    def _scores(
        self,
        version: Version,
        draft: LanguageModel,
        answers: Mapping[int, LoggedAnswer | None],
        states: TargetStates | None,
    ) -> dict[int, Score]:
        """Return the scores of answers. An answer on which the logits are not finite accepts nothing.

        Raises:
            NonFiniteLogits: the logits are finite on no answer so far.
        """
        scores, problem = dict[int, Score](), None
        for number, answer in answers.items():
            try:
                scores[number] = self._scored(draft, answer, states)
            except NonFiniteLogits as error:
                problem = error
        if problem is not None and not scores and not self.table.of(version.name):
            raise problem
        nothing = {number: answer for number, answer in answers.items() if answer is not None and number not in scores}
        return scores | {
            number: nothing_accepted(unscored, self.config.speculation_length) for number, unscored in nothing.items()
        }

    def _scored(self, draft: LanguageModel, answer: LoggedAnswer | None, states: TargetStates | None) -> Score:
        length = self.config.speculation_length
        if answer is None or not answer.response_ids:
            return Score((0.0,) * length, (0.0,) * length, 0.0, 0)  # of no position: it is no evidence
        if self.config.evidence == "log":
            return logged_score(draft, answer, states, length)
        assert states is not None
        return target_score(draft, answer, states, length)

    def _states(self, draft: LanguageModel) -> TargetStates | None:
        """Return the target's states, None if they are not needed."""
        if draft.state_input is None and self.config.evidence == "log":
            return None
        return TargetStates(self._drafts.loaded_target())

    def _draft(self, version: Version, question: Question) -> LanguageModel:
        pair = {question.version.name, question.against.name}
        self._loaded = {name: draft for name, draft in self._loaded.items() if name in pair}
        if version.name not in self._loaded:
            self._loaded[version.name] = self._drafts.load(version)
        return self._loaded[version.name]
