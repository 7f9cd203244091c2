"""Evaluation of one run's drafts on its held-out answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distillspec.config import TrainCommand
from distillspec.config.evaluation import EvaluationConfig
from distillspec.data.held_out import split_held_out
from distillspec.evaluation import EvaluationResult, TargetStates, evaluate
from distillspec.models import LanguageModel
from distillspec.types import Sample


@dataclass(frozen=True)
class HeldOutEvaluator:
    """Evaluates the drafts of one run on its held-out answers, which the target reads once.

    The first prompts (`train.eval_max_prompts`, at most half) choose the best checkpoint. The rest give the figures.
    """

    config: TrainCommand
    held_out: list[Sample]
    states: TargetStates

    def untrained(self, draft: LanguageModel) -> EvaluationResult:
        """Return what `whole` does, except a measured speed-up: decoding with an untrained draft only takes minutes."""
        return self._whole(draft, replace(self.config.evaluation, measure_speedup=False))

    def whole(self, draft: LanguageModel) -> EvaluationResult:
        """Return every figure, with costs, on the prompts that did not choose."""
        return self._whole(draft, self.config.evaluation)

    def _whole(self, draft: LanguageModel, measures: EvaluationConfig) -> EvaluationResult:
        result = self._evaluate(draft, self._split[1], None, measures)
        self.states.save()
        return result

    def quick(self, draft: LanguageModel) -> dict[str, float]:
        """Return acceptance on the prompts that choose the best checkpoint, as scalars for curves."""
        result = self._evaluate(draft, self._split[0], self.selection_prompts, self.config.evaluation)
        gamma = min(4, len(result.tau))
        values = {
            "eval/alpha": result.alpha.mean,
            "eval/alpha_low": result.alpha.low,
            "eval/alpha_high": result.alpha.high,
            "eval/greedy_agreement": result.greedy_agreement.mean,
            f"eval/tau_{gamma}": result.tau[gamma - 1].mean,
        }
        positions = enumerate(result.alpha_by_position[1:gamma], start=2)
        values |= {f"eval/alpha_{position}": interval.mean for position, interval in positions}
        return values | {f"eval/alpha/{domain}": i.mean for domain, i in result.alpha_by_domain.items()}

    @property
    def selection_prompts(self) -> int:
        """Number of prompts that choose the best checkpoint."""
        return len(self._split[0])

    @property
    def choosing(self) -> list[Sample]:
        """Answers that choose the best checkpoint and give no figures. Empty where the only answer does both."""
        choosing, quoted = self._split
        return [] if choosing == quoted else choosing

    @property
    def _split(self) -> tuple[list[Sample], list[Sample]]:
        return split_held_out(self.held_out, self.config.train.eval_max_prompts)

    def _evaluate(
        self, draft: LanguageModel, samples: list[Sample], max_prompts: int | None, measures: EvaluationConfig
    ) -> EvaluationResult:
        return evaluate(
            draft,
            self.states.target,
            samples,
            self.config.sampling.policy,
            measures,
            max_prompts=max_prompts,
            seed=self.config.seed,
            states=self.states,
        )
