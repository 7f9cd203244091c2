"""One update of the draft: a few optimizer steps on logged answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from distillspec.config import AdaptConfig, LossConfig, TrainConfig
from distillspec.data.packing import collate, plan_epoch
from distillspec.errors import RunError
from distillspec.losses import DenseTeacher, LossMix, SignalTeacher, chunked_loss
from distillspec.models import LanguageModel
from distillspec.sampling import NonFiniteLogits
from distillspec.serving.online.adapters import Adapters
from distillspec.serving.online.records import ACCEPTED, PLAIN, REJECTED, LoggedAnswer
from distillspec.training.module import DistillModule, loss_hidden
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.types import Sample, TokenBatch

WARM_UP = 10  # steps


@dataclass(frozen=True)
class Lesson:
    """A sample and how much each of its response tokens counts, `[R]` float32."""

    sample: Sample
    weights: Tensor
    scale: float = 1.0  # of all of them: its tenant's weight


@dataclass(frozen=True)
class Learnt:
    """What an update did."""

    steps: int
    tokens: int  # response tokens with a weight, repeats counted
    bad_steps: int
    loss: float  # mean a token, first and last tenth of the steps
    loss_at_end: float
    seconds: float
    cpu_s: float
    problem: str = ""  # why there is no new version; empty where there is
    # Acceptance on the update's text, first and last tenth; too high without draws from the tail.
    alpha: float = math.nan
    alpha_at_end: float = math.nan

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class _Tally:
    losses: list[float] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    tokens: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0
    problem: str = ""


def lesson_of(answer: LoggedAnswer, config: AdaptConfig, scale: float = 1.0) -> Lesson:
    """What an answer teaches, by `adapt.positions`.

    `rejected` are OSD's positions: those where the draft was wrong. Where nothing was drafted (length 0) nobody knows,
    so these count too: a draft so bad that nobody uses it must still be able to learn.
    """
    outcomes = answer.outcomes
    if config.positions == "all":
        weights = torch.ones(len(answer))
    elif config.positions == "rejected":
        weights = ((outcomes == REJECTED) | (outcomes == PLAIN)).float()
    else:
        weights = torch.where(outcomes == ACCEPTED, config.accepted_weight, 1.0)
    return Lesson(answer.sample(), weights, scale)


def learn(
    draft: LanguageModel,
    lessons: Sequence[Lesson],
    config: AdaptConfig,
    loss: LossConfig,
    *,
    anchor: LanguageModel | None = None,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Learnt:
    """Train `draft` (float32 weights) in place.

    Steps whose numbers are not finite are left out; `max_bad_steps` of them in a row end the update with a problem,
    and the weights are not to be used then.

    Raises:
        RunError: nothing among the lessons has a weight.
    """
    if not any(bool((lesson.weights > 0).any()) for lesson in lessons):
        raise RunError("no logged token has a weight; use adapt.positions=all, or wait for more requests")
    started, cpu = time.monotonic(), time.process_time()
    student = _Student(draft, config, loss, anchor, _shares(lessons))
    tally = _Tally()
    draft.model.train()
    apart = config.lora_rank > 0 and config.lora_by == "domain"
    groups = _of_domains(lessons) if apart else [lessons]
    steps = min(config.max_steps, sum(len(_plans(group, config, seed)) for group in groups))
    for step, (batch, weights, normalizer) in enumerate(_in_turn(groups, config, draft, seed)):
        if step >= config.max_steps or tally.problem:
            break
        student.warm_up(step, steps)
        student.meet(batch.domains[0])
        _take(student, batch, weights, normalizer, tally, config)
        if on_step is not None:
            on_step(step)
    draft.model.eval()
    student.finish()
    if not tally.problem and not tally.losses:
        tally.problem = "no step was finite"
    if not tally.problem and not _all_finite(draft):
        tally.problem = "weights became NaN or infinite"
    tenth = max(1, len(tally.losses) // 10)
    return Learnt(
        steps=len(tally.losses),
        tokens=tally.tokens,
        bad_steps=tally.bad_steps,
        loss=_mean(tally.losses[:tenth]),
        loss_at_end=_mean(tally.losses[-tenth:]),
        seconds=time.monotonic() - started,
        cpu_s=time.process_time() - cpu,
        problem=tally.problem,
        alpha=_mean(tally.alphas[:tenth]),
        alpha_at_end=_mean(tally.alphas[-tenth:]),
    )


class _Student:
    """The draft with its optimizer; with `adapt.lora_rank` only adapters learn, merged at the end."""

    def __init__(
        self,
        draft: LanguageModel,
        config: AdaptConfig,
        loss: LossConfig,
        anchor: LanguageModel | None,
        shares: dict[str, float],
    ) -> None:
        self.draft, self.config, self.anchor = draft, config, anchor
        choose_trainable(draft, train_embeddings=False)
        self._adapters: Adapters | None = None
        if config.lora_rank:
            self._adapters = Adapters(draft, config.lora_rank, shares if config.lora_by == "domain" else {"": 1.0})
        self.module = DistillModule(draft, loss)
        self.mix = LossMix.parse(loss.terms)
        settings = TrainConfig(max_steps=config.max_steps, learning_rate=config.learning_rate)
        self.optimizer = make_optimizer(self.module, settings)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def meet(self, domain: str) -> None:
        """The next batch is of this domain (or begins with it, where domains do not learn apart)."""
        if self._adapters is not None:
            self._adapters.choose(domain)

    def warm_up(self, step: int, steps: int) -> None:
        """Adam's first steps are the least informed: the rate rises over ten of them, of a short update over half."""
        rising = max(1, min(WARM_UP, steps // 2))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * min(1.0, (step + 1) / rising)

    def gradients(self, batch: TokenBatch, weights: Tensor, normalizer: float) -> tuple[float, float]:
        """Backward of one batch; its loss and acceptance a token."""
        self.optimizer.zero_grad(set_to_none=True)
        assert batch.signal is not None
        hidden = loss_hidden(self.draft, batch)
        result = chunked_loss(
            hidden,
            self.module.head(),
            SignalTeacher(batch.signal),
            self.mix,
            kept_ids=self.module.kept_ids,
            labels=batch.labels,
            from_draft=batch.from_draft,
            weights=weights,
            normalizer=normalizer,
        )
        loss = result.loss
        if self.anchor is not None:
            # Both distributions are over the draft's own columns, so no vocabulary is involved.
            with torch.no_grad():
                before = DenseTeacher(loss_hidden(self.anchor, batch), self.anchor.head)
            mix = LossMix.parse("fkl")
            kept = chunked_loss(hidden, self.module.head(), before, mix, weights=weights, normalizer=normalizer)
            loss = loss + self.config.anchor * kept.loss
        loss.backward()
        return float(loss.detach()), float(result.metrics["alpha"] / result.metrics["weight"])

    def finish(self) -> None:
        if self._adapters is not None:
            self._adapters.merge()


def _take(
    student: _Student, batch: TokenBatch, weights: Tensor, normalizer: float, tally: _Tally, config: AdaptConfig
) -> None:
    """One optimizer step, or none where its numbers are not finite."""
    try:
        loss, alpha = student.gradients(batch, weights, normalizer)
        norm = float(torch.nn.utils.clip_grad_norm_(student.parameters, config.clip_norm))
        problem = "" if math.isfinite(loss) and math.isfinite(norm) else f"loss {loss}, gradient norm {norm}"
    except NonFiniteLogits as error:
        problem = str(error)
    if problem:
        tally.bad_steps += 1
        tally.bad_in_a_row += 1
        if tally.bad_in_a_row >= config.max_bad_steps:
            tally.problem = f"{tally.bad_in_a_row} steps in a row were not finite ({problem})"
        return
    student.optimizer.step()
    tally.bad_in_a_row = 0
    tally.losses.append(loss)
    tally.alphas.append(alpha)
    tally.tokens += int((weights > 0).sum())


def _shares(lessons: Sequence[Lesson]) -> dict[str, float]:
    """Domain → its share of all weights."""
    sums: dict[str, float] = {}
    for lesson in lessons:
        sums[lesson.sample.domain] = sums.get(lesson.sample.domain, 0.0) + _counts_for(lesson)
    return {domain: own / sum(sums.values()) for domain, own in sorted(sums.items())}


def _counts_for(lesson: Lesson) -> float:
    return lesson.scale * float(lesson.weights.sum())


def _of_domains(lessons: Sequence[Lesson]) -> list[list[Lesson]]:
    return [[lesson for lesson in lessons if lesson.sample.domain == domain] for domain in _shares(lessons)]


def _in_turn(
    groups: Sequence[Sequence[Lesson]], config: AdaptConfig, draft: LanguageModel, seed: int
) -> Iterator[tuple[TokenBatch, Tensor, float]]:
    """Batches of one group each, the groups in turn."""
    lessons = [lesson for group in groups for lesson in group]
    mean = sum(map(_counts_for, lessons)) / sum(float(lesson.weights.sum()) for lesson in lessons)
    for turn in zip_longest(*(_batches(group, config, draft, seed, mean) for group in groups)):
        yield from (found for found in turn if found is not None)


def _plans(lessons: Sequence[Lesson], config: AdaptConfig, seed: int) -> list[list[list[int]]]:
    """Batch by batch, epoch after epoch: rows of lessons' places."""
    lengths = [len(lesson.sample) for lesson in lessons]
    rows = max(1, config.batch_tokens // config.row_tokens)
    return [
        plan for epoch in range(config.epochs) for plan in plan_epoch(lengths, config.row_tokens, rows, seed, epoch)
    ]


def _batches(
    lessons: Sequence[Lesson], config: AdaptConfig, draft: LanguageModel, seed: int, mean_scale: float
) -> Iterator[tuple[TokenBatch, Tensor, float]]:
    """Packed batches with a weight for every loss position, and what a batch's loss is divided by.

    That is not the sum of its own weights but what they would sum to with the update's mean scale: else a batch of one
    tenant's text alone would count in full however small that tenant's weight.
    """
    samples = [lesson.sample for lesson in lessons]
    pad = None if draft.tokenizer is None else draft.tokenizer.pad_token_id
    for plan in _plans(lessons, config, seed):
        batch = collate([[samples[i] for i in row] for row in plan], config.row_tokens, pad if pad is not None else 0)
        counts = torch.bincount(batch.sample_index, minlength=len(batch.domains)).tolist()
        chosen = [lessons[i] for row in plan for i in row]
        own = [lesson.weights[:count] for lesson, count in zip(chosen, counts, strict=True)]
        weights = torch.cat([lesson.scale * each for lesson, each in zip(chosen, own, strict=True)])
        normalizer = mean_scale * float(torch.cat(own).sum())
        if normalizer > 0:
            yield batch.to(draft.device), weights.to(draft.device), normalizer


def _all_finite(draft: LanguageModel) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in draft.model.parameters())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
