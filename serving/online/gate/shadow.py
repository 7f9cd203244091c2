"""Shadow scoring of drafts beside the traffic: the target reads held-out answers, with whole distributions."""

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

BetweenAnswers = Callable[[], None]
"""Called before each answer, since scoring all of them may take minutes. May raise."""


@dataclass(frozen=True)
class EvaluationSample:
    """One held-out answer and the policy it was sampled under."""

    sample: Sample
    policy: SamplingPolicy
    answers: str | None = None  # request id. None: no other sample answers the same request.

    @property
    def request(self) -> str:
        return self.answers or self.sample.prompt_id


@dataclass(frozen=True)
class Score:
    """Score of one draft on one answer: expected tokens and blocks by length γ = 1 … G, and Σ α over positions."""

    domain: str
    tokens: tuple[float, ...]
    blocks: tuple[float, ...]
    alpha: float
    positions: int


def sum_scores(scores: Sequence[Score]) -> Score:
    """Add the scores of the answers to one request."""
    first = scores[0]
    return Score(
        first.domain,
        tuple(map(sum, zip(*[score.tokens for score in scores], strict=True))),
        tuple(map(sum, zip(*[score.blocks for score in scores], strict=True))),
        sum(score.alpha for score in scores),
        sum(score.positions for score in scores),
    )


class ServedStates(TargetStates):
    """Hidden states of a target that an engine serves.

    The engine's attention works on cache slots only, so every answer gets a slot of its own.
    """

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
    """Texts were deleted while drafts were scored on them."""


class Shadow:
    """Scores drafts, one answer at a time through `run`. Scores are kept."""

    def __init__(self, target: LanguageModel, states: TargetStates, max_gamma: int, run: Run | None = None) -> None:
        self.target, self.states, self.max_gamma = target, states, max_gamma
        self.run: Run = run or (lambda work: work())
        self._known: dict[tuple[str, str], Score] = {}
        self._forgotten = 0  # calls of `forget`

    def by_request(
        self,
        draft: LanguageModel,
        samples: Sequence[EvaluationSample],
        between_answers: BetweenAnswers = lambda: None,
    ) -> list[Score]:
        """Score each request as a whole, since its answers are not independent. See `scores`."""
        found: dict[str, list[Score]] = {}
        for sample, score in zip(samples, self.scores(draft, samples, between_answers), strict=True):
            found.setdefault(sample.request, []).append(score)
        return [sum_scores(scores) for scores in found.values()]

    def scores(
        self,
        draft: LanguageModel,
        samples: Sequence[EvaluationSample],
        between_answers: BetweenAnswers = lambda: None,
    ) -> list[Score]:
        """Score each sample, in order.

        Args:
            between_answers: called before each sample. All of them may take minutes.

        Raises:
            NonFiniteLogits: the draft's logits are not finite somewhere.
            TextsForgotten: `forget` was called during the scoring, and the samples may hold deleted text.
        """
        forgotten, found = self._forgotten, []
        for sample in samples:
            between_answers()
            found.append(self._score(draft, sample))
            if self._forgotten != forgotten:
                self._clear()  # states kept for the answer just scored
                raise TextsForgotten("texts were deleted while it was judged on them")
        return found

    @property
    def kept(self) -> tuple[int, int]:
        """Number of scores and of hidden states that are kept."""
        return len(self._known), self.states.count

    def forget(self) -> None:
        """Drop all hidden states and scores, of all texts."""
        self._forgotten += 1
        self._clear()

    def forget_beyond(self, answers: int) -> None:
        """Drop hidden states beyond `answers` of them, scores beyond four times as many."""
        scores, states = self.kept
        if states > answers:
            self.states.forget()
        if scores > 4 * answers:
            self._known.clear()

    def _clear(self) -> None:
        self._known.clear()
        self.states.forget()

    def _score(self, draft: LanguageModel, sample: EvaluationSample) -> Score:
        key = (draft.identity.weights_hash, f"{sample.sample.prompt_id}/{hash(sample.sample.response_ids)}")
        score = self._known.get(key)
        if score is None:  # two lines: another thread may clear `_known` in between
            score = self._known[key] = self.run(lambda: self._measure(draft, sample))
        return score

    def _measure(self, draft: LanguageModel, sample: EvaluationSample) -> Score:
        answer = sample.sample
        positions = measure_positions(
            draft, self.target, answer, sample.policy, states=self.states, depths=self.max_gamma
        )
        counts = count_blocks(positions, answer.finished, self.max_gamma)
        alpha = float(positions.alpha.sum())
        return Score(answer.domain, tuple(counts.tokens.tolist()), tuple(counts.blocks.tolist()), alpha, len(positions))
