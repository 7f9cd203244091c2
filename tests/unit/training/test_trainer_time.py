"""A run limited by minutes: its evaluations, saves and refreshes count."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.models import LanguageModel
from distillspec.training.trainer import Trainer
from distillspec.types import Sample

from .runs import metrics


class Clock:
    """Time that passes only where a test says so: a second a step, and what an evaluation takes."""

    def __init__(
        self,
        make_trainer: Any,
        evaluation: float,
        expected: float,
        samples_: list[Sample] | None = None,
        **settings: Any,
    ) -> None:
        self.now, self.evaluated = 0.0, list[float]()
        limits = {"max_steps": None, "max_minutes": 1.5, "eval_every": None, "schedule": "wsd", **settings}
        self.trainer: Trainer = make_trainer(
            train=limits,
            evaluate=self._evaluate(evaluation),
            clock=lambda: self.now,
            evaluation_s=expected,
            samples_=samples_,
        )
        update = self.trainer.strategy.update
        self.trainer.strategy.update = lambda: (update(), self.pass_by(1.0))  # type: ignore[method-assign]

    def _evaluate(self, seconds: float) -> Any:
        def evaluate(model: LanguageModel) -> dict[str, float]:
            self.evaluated.append(self.now)
            self.pass_by(seconds)
            return {"eval/alpha": 0.5}

        return evaluate

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("evaluation", "evaluations"), [(13.5, 1), (4.0, 3), (0.5, 10)])
def test_minutes_are_the_wall_time_of_the_loop_and_evaluations_keep_to_their_share(
    make_trainer, evaluation: float, evaluations: int
) -> None:
    clock = Clock(make_trainer, evaluation, expected=evaluation)
    result = clock.trainer.run()
    assert result.stopped_by == "minutes"
    assert 90 <= clock.now <= 91  # the step that meets the limit is finished
    assert result.progress.seconds == pytest.approx(clock.now)
    assert len(clock.evaluated) == evaluations
    assert result.progress.evaluating == evaluation * evaluations <= 0.15 * 90
    rates = [line["train/lr"] for line in metrics(clock.trainer.folder) if "train/lr" in line]
    assert rates[-1] < 0.05 * max(rates)  # the decay ends where training does


def test_an_evaluation_that_takes_longer_than_expected_is_the_measure_of_the_next(make_trainer) -> None:
    clock = Clock(make_trainer, evaluation=10.0, expected=0.0)
    clock.trainer.run()
    assert clock.evaluated == [9.0, 80.0]
    assert clock.now == 90.0


def test_saves_and_fresh_samples_count_as_well(make_trainer, samples: list[Sample]) -> None:
    def refresh(draft: LanguageModel, step: int) -> list[Sample]:
        clock.pass_by(20.0)
        return samples

    clock = Clock(make_trainer, 1.0, 1.0, save_every=10)
    trainer = clock.trainer
    trainer.refresh, trainer.config.data.refresh_steps = refresh, 30
    save = trainer.save
    trainer.save = lambda: (save(), clock.pass_by(3.0))  # type: ignore[method-assign]
    trainer.run()
    assert 90 <= clock.now <= 94
    assert trainer.progress.seconds == pytest.approx(clock.now)


@pytest.mark.parametrize(("seconds", "taken"), [(25.0, 2), (200.0, 1)])
def test_fresh_samples_that_do_not_fit_into_the_time_left_are_not_taken(
    make_trainer, samples: list[Sample], seconds: float, taken: int
) -> None:
    asked = []

    def refresh(draft: LanguageModel, step: int) -> list[Sample]:
        asked.append(step)
        clock.pass_by(seconds)
        return samples

    clock = Clock(make_trainer, 1.0, 1.0, eval_every=1000, samples_=[])
    clock.trainer.refresh, clock.trainer.config.data.refresh_steps = refresh, 10
    result = clock.trainer.run()
    assert asked == [0, 10][:taken]
    assert clock.now == pytest.approx(max(90, seconds + 2))  # the first is always taken, and a step learns from it
    assert result.progress.refresh == seconds
