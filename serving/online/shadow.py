"""Judging drafts beside the traffic: held-out answers read again by the target, with whole distributions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.errors import RunError
from distillspec.evaluation.blocks import count_blocks
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache, SlotView
from distillspec.types import Sample, SamplingPolicy

Run = Callable[[Callable[[], "Score"]], "Score"]
"""Runs one piece of work where the target may be used."""


@dataclass(frozen=True)
class Exam:
    """One held-out answer and the policy it was sampled under."""

    sample: Sample
    policy: SamplingPolicy
    answers: str | None = None  # the request; None: nothing else answers the same

    @property
    def request(self) -> str:
        return self.answers or self.sample.prompt_id


@dataclass(frozen=True)
class Score:
    """One draft on one answer: expected tokens and blocks by length γ = 1 … G, and Σ α over its positions."""

    domain: str
    tokens: tuple[float, ...]
    blocks: tuple[float, ...]
    alpha: float
    positions: int


def together(scores: Sequence[Score]) -> Score:
    """Answers to one request as one."""
    first = scores[0]
    return Score(
        first.domain,
        tuple(map(sum, zip(*[score.tokens for score in scores], strict=True))),
        tuple(map(sum, zip(*[score.blocks for score in scores], strict=True))),
        sum(score.alpha for score in scores),
        sum(score.positions for score in scores),
    )


class ServedStates(TargetStates):
    """The target's hidden states while an engine serves with it: its attention knows slots alone, so a slot of their
    own is made for every answer."""

    def hidden(self, sample: Sample) -> Tensor:
        key = hashlib.sha256(repr((sample.prompt_ids, sample.response_ids)).encode()).hexdigest()
        states = self._known.get(key)
        if states is None:
            states = self._known[key] = self._read(sample)
        return states

    @torch.no_grad()
    def _read(self, sample: Sample) -> Tensor:
        read = [*sample.prompt_ids, *sample.response_ids[:-1]]
        device = self.target.device
        start, count = torch.tensor([0], device=device), torch.tensor([len(read)], device=device)
        view = SlotView.append(SlotCache(1, len(read)), [0], start, count, len(read))
        hidden = self.target.hidden(torch.tensor([read], device=device), view.positions, slot_view=view)
        return hidden[0, len(sample.prompt_ids) - 1 :].clone()


class TextsForgotten(RunError):
    """Texts were deleted while drafts were judged on them."""


class Shadow:
    """Scores drafts, one answer at a time through `run`; what was scored once is remembered."""

    def __init__(self, target: LanguageModel, states: TargetStates, max_gamma: int, run: Run | None = None) -> None:
        self.target, self.states, self.max_gamma = target, states, max_gamma
        self.run: Run = run or (lambda work: work())
        self._known: dict[tuple[str, str], Score] = {}
        self._forgotten = 0  # times that texts were dropped

    def by_request(
        self, draft: LanguageModel, exams: Sequence[Exam], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Score]:
        """A score for each request: its answers are no witnesses independent of each other. See `scores`."""
        found: dict[str, list[Score]] = {}
        for exam, score in zip(exams, self.scores(draft, exams, meanwhile), strict=True):
            found.setdefault(exam.request, []).append(score)
        return [together(scores) for scores in found.values()]

    def scores(
        self, draft: LanguageModel, exams: Sequence[Exam], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Score]:
        """A score for each exam, in order.

        Args:
            meanwhile: called before each; all of them may take minutes, and other things should not wait for it.

        Raises:
            NonFiniteLogits: the draft gives no distribution somewhere.
            TextsForgotten: `forget` was called meanwhile; the exams may be of what was deleted.
        """
        forgotten, found = self._forgotten, []
        for exam in exams:
            meanwhile()
            found.append(self._score(draft, exam))
            if self._forgotten != forgotten:
                self._clear()  # of the answer that was under way
                raise TextsForgotten("texts were deleted while it was judged on them")
        return found

    def forget(self) -> None:
        """Drop all that was read of anybody's text."""
        self._forgotten += 1
        self._clear()

    def forget_beyond(self, answers: int) -> None:
        """Begin anew when more answers than these are remembered; of scores, four times as many."""
        if len(self.states._known) > answers:
            self.states._known.clear()
        if len(self._known) > 4 * answers:
            self._known.clear()

    def _clear(self) -> None:
        self._known.clear()
        self.states._known.clear()

    def _score(self, draft: LanguageModel, exam: Exam) -> Score:
        key = (draft.identity.weights_hash, f"{exam.sample.prompt_id}/{hash(exam.sample.response_ids)}")
        score = self._known.get(key)
        if score is None:  # kept by hand: another thread may forget everything in between
            score = self._known[key] = self.run(lambda: self._measure(draft, exam))
        return score

    def _measure(self, draft: LanguageModel, exam: Exam) -> Score:
        sample = exam.sample
        positions = measure_positions(draft, self.target, sample, exam.policy, states=self.states)
        counts = count_blocks(positions, sample.finished, self.max_gamma)
        alpha = float(positions.alpha.sum())
        return Score(sample.domain, tuple(counts.tokens.tolist()), tuple(counts.blocks.tolist()), alpha, len(positions))
