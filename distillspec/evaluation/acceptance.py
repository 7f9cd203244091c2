"""Evaluation of one draft on held-out text: acceptance, block efficiency, cost and speed-up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distillspec.config import EvaluationConfig
from distillspec.errors import ConfigError
from distillspec.evaluation.blocks import count_blocks
from distillspec.evaluation.bootstrap import ratio_intervals, resampled_ratios
from distillspec.evaluation.cost import COSTS, StepCost
from distillspec.evaluation.measured import DECODERS, MeasuredSpeedup, grouped, measure_speedup
from distillspec.evaluation.positions import Positions, measure_positions
from distillspec.evaluation.speedup import Speedup, predict_speedup
from distillspec.evaluation.states import TargetStates
from distillspec.models.language_model import LanguageModel
from distillspec.types import Interval, Sample, SamplingPolicy

PER_POSITION = ("alpha", "agreement", "p_of_draft_argmax", "ceiling")
DEFAULT_GAMMA = 4  # measured when no predicted speed-up says which length is best


@dataclass(frozen=True)
class EvaluationResult:
    """Figures of one draft. Intervals are 95 % bootstrap intervals over prompts."""

    draft: str
    policy: SamplingPolicy
    prompts: int
    positions: int
    alpha: Interval
    alpha_by_domain: dict[str, Interval]
    greedy_agreement: Interval
    p_of_draft_argmax: Interval
    ceiling: Interval
    tau: tuple[Interval, ...]  # γ = 1, 2, …
    alpha_by_position: tuple[Interval, ...] = ()  # of the first, second, … drafted token, where they differ
    cost: dict[int, StepCost] | None = None  # by batch
    speedup: dict[int, Speedup] | None = None  # by batch
    measured: MeasuredSpeedup | None = None
    measured_at: dict[int, MeasuredSpeedup] | None = None  # by the number of prompts side by side, above 1
    cut: float = 0.0  # share of the answers that the token limit cut
    by_prompt: tuple[PromptSums, ...] = ()  # resampled for the intervals
    kind: str = ""  # `LanguageModel.kind`
    # Of heads, by drafted position and rank: P(the target's token is the one of that rank).
    rank_acceptance: tuple[tuple[float, ...], ...] = ()

    def alpha_at(self, position: int) -> Interval:
        """Return α of the `position`-th drafted token, from 1 on, under the kind's own recursion."""
        return self.alpha_by_position[position - 1] if self.alpha_by_position else self.alpha

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and floats. Batch sizes become strings, sums by prompt are left out."""
        text = asdict(replace(self, cost=None, speedup=None, measured=None, measured_at=None, by_prompt=()))
        del text["by_prompt"]
        return {
            **text,
            "tau": list(text["tau"]),
            "alpha_by_position": [asdict(self.alpha_at(position)) for position in range(1, len(self.tau) + 1)],
            "cost": _by_batch(self.cost),
            "speedup": _by_batch(self.speedup),
            "measured": None if self.measured is None else self.measured.to_json(),
            "measured_at": _by_batch(self.measured_at),
        }


def _by_batch(
    values: Mapping[int, StepCost] | Mapping[int, Speedup] | Mapping[int, MeasuredSpeedup] | None,
) -> dict[str, Any] | None:
    return None if values is None else {str(batch): value.to_json() for batch, value in values.items()}


@dataclass(frozen=True)
class PromptSums:
    """Sums over one prompt's responses: positions, `PER_POSITION` and block counts."""

    domain: str
    positions: int
    values: NDArray[np.float64]  # [len(PER_POSITION)], then α of the second, third, … drafted position if they differ
    tokens: NDArray[np.float64]  # [G]
    blocks: NDArray[np.float64]  # [G]
    ranks: NDArray[np.float64] = field(default_factory=partial(np.zeros, (0, 0)))  # [drafted positions, ranks], heads

    def alpha_sum(self, position: int) -> float:
        """Return the sum of α of the `position`-th drafted token, from 1 on."""
        deeper = position > 1 and len(self.values) > len(PER_POSITION)
        return float(self.values[len(PER_POSITION) + position - 2 if deeper else 0])

    def __add__(self, other: PromptSums) -> PromptSums:
        return PromptSums(
            self.domain,
            self.positions + other.positions,
            self.values + other.values,
            self.tokens + other.tokens,
            self.blocks + other.blocks,
            self.ranks + other.ranks,
        )


def evaluate(
    draft: LanguageModel,
    target: LanguageModel,
    samples: Sequence[Sample],
    policy: SamplingPolicy,
    config: EvaluationConfig,
    *,
    max_prompts: int | None = None,
    seed: int = 0,
    on_sample: Callable[[int, int], None] | None = None,
    states: TargetStates | None = None,
) -> EvaluationResult:
    """Measure the draft as it would be deployed: in the target's number format, without dropout.

    Args:
        samples: held-out prompts with responses sampled from the *target under `policy`*. Block efficiency is unbiased
            only on such text (acceptance rates hold on any). Responses of one prompt count as one.
        max_prompts: the quick variant for use during training: only the first so many prompts, no timing,
            and at most `DEFAULT_GAMMA` drafted tokens.
        on_sample: called with `(done, total)`.
        states: the target's hidden states on these samples, from earlier evaluations of the same run.

    Raises:
        ConfigError: no sample has a response.
    """
    samples = _first_prompts([sample for sample in samples if sample.response_ids], max_prompts)
    if not samples:
        raise ConfigError("there is nothing to evaluate: no held-out prompt has a response")
    length = config.speculation_length if max_prompts is None else min(config.speculation_length, DEFAULT_GAMMA)
    with deployed(draft, target) as model:
        prompts = _sum_by_prompt(model, target, samples, policy, length, on_sample, states or TargetStates(target))
        result = _summarise(draft.name, policy, prompts, config.bootstrap_samples, seed)
        result = replace(result, cut=cut_share(samples), kind=draft.kind)
        if max_prompts is None:
            result = _add_timings(result, model, target, samples, config, seed)
    return result


def cut_share(samples: Sequence[Sample]) -> float:
    """Return the share of the answers that the token limit (or a deadline) cut."""
    return sum(not sample.finished for sample in samples) / max(1, len(samples))


@contextmanager
def deployed(draft: LanguageModel, target: LanguageModel) -> Iterator[LanguageModel]:
    """Yield the draft in evaluation mode and the target's number format. The given one stays as it was."""
    if draft.dtype == target.dtype:
        training = draft.model.training
        draft.model.eval()
        try:
            yield draft
        finally:
            draft.model.train(training)
        return
    model = copy.deepcopy(draft.model).eval().requires_grad_(False)
    # Parameters alone: rotary frequencies are buffers and stay in float32, as when loading in this format.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(target.dtype)
    yield replace(draft, model=model)


def _first_prompts(samples: list[Sample], max_prompts: int | None) -> list[Sample]:
    chosen = set(list(dict.fromkeys(sample.prompt_id for sample in samples))[:max_prompts])
    return [sample for sample in samples if sample.prompt_id in chosen]


def _sum_by_prompt(
    draft: LanguageModel,
    target: LanguageModel,
    samples: Sequence[Sample],
    policy: SamplingPolicy,
    speculation_length: int,
    on_sample: Callable[[int, int], None] | None,
    states: TargetStates,
) -> list[PromptSums]:
    sums: dict[str, PromptSums] = {}
    for done, sample in enumerate(samples, start=1):
        positions = measure_positions(
            draft, target, sample, policy, states=states, speculation_length=speculation_length
        )
        counts = count_blocks(positions, sample.finished, speculation_length)
        sums_here = [getattr(positions, name).sum() for name in PER_POSITION]
        values = torch.stack([*sums_here, *(each.alpha.sum() for each in positions.deeper)])
        arrays = values.numpy(), counts.tokens.numpy(), counts.blocks.numpy(), _rank_sums(positions)
        new = PromptSums(sample.domain, len(positions), *arrays)
        sums[sample.prompt_id] = sums[sample.prompt_id] + new if sample.prompt_id in sums else new
        if on_sample is not None:
            on_sample(done, len(samples))
    return list(sums.values())


def _rank_sums(positions: Positions) -> NDArray[np.float64]:
    """Return the sums of p by drafted position and rank `[positions, ranks]`, empty where there are no heads."""
    sums = [each.by_rank.sum(0).numpy() for each in (positions, *positions.deeper) if each.by_rank is not None]
    return np.stack(sums) if sums else np.zeros((0, 0))


def _summarise(
    name: str, policy: SamplingPolicy, prompts: Sequence[PromptSums], bootstrap_samples: int, seed: int
) -> EvaluationResult:
    alpha, agreement, p_of_draft_argmax, ceiling, *deeper = _per_position(prompts, bootstrap_samples, seed)
    domains, count = sorted({prompt.domain for prompt in prompts}), sum(prompt.positions for prompt in prompts)
    by_domain = {
        domain: _per_position([p for p in prompts if p.domain == domain], bootstrap_samples, seed)[0]
        for domain in domains
    }
    return EvaluationResult(
        draft=name,
        policy=policy,
        prompts=len(prompts),
        positions=count,
        alpha=alpha,
        alpha_by_domain=by_domain,
        greedy_agreement=agreement,
        p_of_draft_argmax=p_of_draft_argmax,
        ceiling=ceiling,
        tau=tuple(ratio_intervals(*_block_sums(prompts), bootstrap_samples, seed)),
        alpha_by_position=(alpha, *deeper) if deeper else (),
        by_prompt=tuple(prompts),
        rank_acceptance=tuple(map(tuple, (np.stack([prompt.ranks for prompt in prompts]).sum(0) / count).tolist())),
    )


def _block_sums(prompts: Sequence[PromptSums]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return tokens and blocks `[P, G]`: numerators and denominators of τ."""
    return np.stack([p.tokens for p in prompts]), np.stack([p.blocks for p in prompts])


def _per_position(prompts: Sequence[PromptSums], bootstrap_samples: int, seed: int) -> list[Interval]:
    values = np.stack([prompt.values for prompt in prompts])
    counts = np.array([[prompt.positions] for prompt in prompts], dtype=np.float64)
    return ratio_intervals(values, np.broadcast_to(counts, values.shape), bootstrap_samples, seed)


def _add_timings(
    result: EvaluationResult,
    draft: LanguageModel,
    target: LanguageModel,
    samples: Sequence[Sample],
    config: EvaluationConfig,
    seed: int,
) -> EvaluationResult:
    if config.measure_cost and config.cost_batches:
        measure = COSTS.get("engine", COSTS["reference"])
        costs = measure(draft, target, config.cost_batches, config.speculation_length)
        tau = [interval.mean for interval in result.tau]
        resampled = resampled_ratios(*_block_sums(result.by_prompt), config.bootstrap_samples, seed)
        speedups = {batch: predict_speedup(tau, cost, resampled, seed, result.prompts) for batch, cost in costs.items()}
        result = replace(result, cost=costs, speedup=speedups)
    decodes = draft.state_input is None or "engine" in DECODERS  # the reference decoder reads tokens alone
    if not config.measure_speedup or not decodes:
        return result
    prompts = list(dict.fromkeys(sample.prompt_ids for sample in samples))

    def measured(batch: int) -> MeasuredSpeedup:
        return measure_speedup(
            draft,
            target,
            grouped(prompts, batch, config.speedup_prompts),
            result.policy,
            _best_gamma(result, batch, config),
            config.speedup_tokens,
            bootstrap_samples=config.bootstrap_samples,
            seed=seed,
            decoders=DECODERS.get("engine", DECODERS["reference"]),
        )

    batches = config.speedup_batches if "engine" in DECODERS else []  # the reference decodes one prompt at a time
    return replace(result, measured=measured(1), measured_at={batch: measured(batch) for batch in batches} or None)


def _best_gamma(result: EvaluationResult, batch: int, config: EvaluationConfig) -> int:
    """Return the length of the highest predicted speed-up at a batch size, `DEFAULT_GAMMA` if none was predicted."""
    if batch not in (result.speedup or {}):
        return min(DEFAULT_GAMMA, config.speculation_length)
    predicted = result.speedup[batch].predicted  # type: ignore[index]
    return 1 + max(range(len(predicted)), key=lambda i: predicted[i])
