"""The loop: it learns, resumes bit for bit, survives bad numbers and damaged checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distillspec.config import DraftConfig, LossConfig
from distillspec.errors import Interrupted, RunError
from distillspec.models import LanguageModel, initialise_draft, load_draft
from distillspec.sampling import NonFiniteLogits
from distillspec.training.checkpoint import Generators, load_newest, save_checkpoint
from distillspec.training.interrupts import StopRequest
from distillspec.training.schedule import Progress
from distillspec.training.trainer import Trainer
from distillspec.types import Sample

TIMINGS = {"seconds", "train/tokens_per_s"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in metrics(folder)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.draft.model.state_dict()


def assert_equal_weights(ours: Trainer, theirs: Trainer) -> None:
    assert all(torch.equal(value, weights(theirs)[name]) for name, value in weights(ours).items())


def stop_at(step: int) -> dict[str, Any]:
    """Trainer arguments that ask it to stop once `step` steps are done."""
    stop = StopRequest()

    def watch(progress: Progress, values: dict[str, float]) -> None:
        if progress.step == step:
            stop.signal_number = 15

    return {"stop": stop, "report": watch}


@pytest.mark.parametrize("loss", ["fkl", "tvd", "ce"])
def test_the_loss_falls_on_a_few_samples(make_trainer, loss: str) -> None:
    train = {"max_steps": 25, "eval_every": 25, "learning_rate": 5e-3, "schedule": "constant"}
    trainer = make_trainer(loss=LossConfig(name=loss), train=train)
    result = trainer.run()
    assert result.stopped_by == "steps"
    losses = [line["train/loss"] for line in metrics(trainer.folder) if "train/loss" in line]
    assert len(losses) == 25
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_acceptance_rises_and_the_best_draft_is_kept(make_trainer, target: LanguageModel) -> None:
    alphas = iter([0.1, 0.7, 0.3, 0.2])
    trainer = make_trainer(evaluate=lambda model: {"eval/alpha": next(alphas)}, train={"eval_every": 2, "max_steps": 8})
    states: dict[int, torch.Tensor] = {}
    trainer.report = lambda progress, values: states.setdefault(
        progress.step, weights(trainer)["lm_head.weight"].clone()
    )
    result = trainer.run()
    assert result.best == {"step": 4, "alpha": 0.7}
    kept = load_draft(trainer.folder / "best", target)
    assert torch.equal(kept.model.lm_head.weight, states[4])
    assert not torch.equal(states[4], states[8])


def test_frozen_embeddings_stay_and_the_rest_moves(make_trainer, target: LanguageModel) -> None:
    trainer = make_trainer()
    trainer.run()
    start = initialise_draft(DraftConfig(keep=[0, 3]), target).model.state_dict()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, start[name])}
    assert moved == set(start) - {"model.embed_tokens.weight"}


def test_a_head_tied_to_the_embeddings_learns(make_trainer, random_model) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), random_model("gemma2"))
    start = draft.model.lm_head.weight.detach().clone()
    make_trainer(draft=draft).run()
    assert draft.model.lm_head.weight is draft.model.get_input_embeddings().weight
    assert not torch.equal(draft.model.lm_head.weight, start)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_an_interrupted_run_ends_bit_for_bit_like_a_whole_one(make_trainer, tmp_path: Path, at: int) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.run()
    first = make_trainer(tmp_path / "parts", **stop_at(at))
    with pytest.raises(Interrupted) as stopped:
        first.run()
    assert stopped.value.signal_number == 15
    assert str(tmp_path / "parts") in str(stopped.value)
    second = make_trainer(tmp_path / "parts")
    assert second.resume() == []
    assert second.progress.step == at
    result = second.run()
    assert_equal_weights(second, whole)
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")
    assert (result.progress.step, result.best) == (whole.progress.step, whole.best)
    ours, theirs = second.strategy.optimizer.state_dict(), whole.strategy.optimizer.state_dict()
    for number, state in ours["state"].items():
        assert all(torch.equal(value, theirs["state"][number][key]) for key, value in state.items())


def test_resume_restores_torchs_generator(make_trainer, tmp_path: Path) -> None:
    first = make_trainer(tmp_path, **stop_at(2))
    with pytest.raises(Interrupted):
        first.run()
    state = torch.get_rng_state()
    second = make_trainer(tmp_path)
    torch.rand(5)
    second.resume()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_generator_of_a_gpu_is_kept_too(make_trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, restored = torch.arange(16, dtype=torch.uint8), list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.append(state))
    make_trainer(tmp_path, train={"max_steps": 1, "eval_every": 1}).run()
    checkpoint = load_newest(tmp_path / "checkpoints")[0]
    assert checkpoint.rng.cuda is None  # trained on a CPU
    cuda = torch.device("cuda")
    save_checkpoint(tmp_path / "other", replace(checkpoint, rng=Generators.now(cuda)), keep=1)
    load_newest(tmp_path / "other")[0].rng.restore(cuda)
    assert len(restored) == 1
    assert torch.equal(restored[0], state)


def test_on_policy_samples_survive_an_interruption(make_trainer, tmp_path: Path, samples: list[Sample]) -> None:
    """The refresh depends on the draft's weights; between refreshes the saved samples go on."""

    def refresh(draft: LanguageModel, step: int) -> list[Sample]:
        asked.append(step)
        shift = 3 + int(draft.model.lm_head.weight.sum().abs() * 100) % 50
        return [Sample(s.prompt_id, "d", s.prompt_ids, (shift, *s.response_ids), None, "draft") for s in samples[:6]]

    def build(folder: Path, **extra: Any) -> Trainer:
        trainer = make_trainer(folder, samples_=[], refresh=refresh, train={"max_steps": 8, "eval_every": 4}, **extra)
        trainer.config.data.refresh_steps = 3
        return trainer

    asked: list[int] = []
    whole = build(tmp_path / "whole")
    whole.run()
    assert asked == [0, 3, 6]
    asked.clear()
    with pytest.raises(Interrupted):
        build(tmp_path / "parts", **stop_at(4)).run()
    second = build(tmp_path / "parts")
    second.resume()
    second.run()
    assert asked == [0, 3, 6]
    assert_equal_weights(second, whole)
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "whole")


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(make_trainer, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path)
    whole.run()
    lines = untimed(tmp_path)
    newest, before = (tmp_path / "checkpoints" / f"step-{step:08d}" for step in (6, 3))
    content = (newest / "state.pt").read_bytes()
    (newest / "state.pt").write_bytes(content[: len(content) // 2])
    again = make_trainer(tmp_path)
    (problem,) = again.resume()
    assert "state.pt" in problem
    assert again.progress.step == 3
    again.tracker.rewind(3)
    again.run()
    assert_equal_weights(again, whole)
    assert untimed(tmp_path) == lines
    for path in (newest, before):
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(RunError, match=r"no usable checkpoint.*start the run anew") as failed:
        make_trainer(tmp_path).resume()
    assert "\n" not in str(failed.value)


def test_a_finished_run_resumes_to_the_same_end(make_trainer, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path)
    whole.run()
    lines = metrics(tmp_path)
    again = make_trainer(tmp_path)
    again.resume()
    again.tracker.rewind(again.progress.step)
    assert again.run().best == whole.best
    assert metrics(tmp_path) == lines


def test_checkpoints_between_evaluations_and_a_run_that_goes_on_from_one(make_trainer, tmp_path: Path) -> None:
    settings = {"max_steps": 5, "eval_every": 4, "save_every": 2, "keep_checkpoints": 9}
    make_trainer(tmp_path / "whole", train=settings).run()
    saved = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in (2, 4, 5)]
    shutil.copytree(tmp_path / "whole" / "checkpoints" / saved[0], tmp_path / "again" / "checkpoints" / saved[0])
    again = make_trainer(tmp_path / "again", train=settings)
    again.resume()
    assert again.progress.step == 2
    again.run()
    ends = [load_newest(tmp_path / run / "checkpoints")[0].strategy["model"] for run in ("whole", "again")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_only_the_newest_checkpoints_are_kept(make_trainer, tmp_path: Path) -> None:
    make_trainer(tmp_path, train={"eval_every": 1, "max_steps": 5, "keep_checkpoints": 3}).run()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{n:08d}" for n in (3, 4, 5)]


class Poison:
    """Makes the loss of chosen steps NaN, forward or backward, in place of a real numerical accident."""

    def __init__(self, trainer: Trainer, steps: set[int], where: str) -> None:
        self.trainer, self.steps, self.where = trainer, steps, where
        self.plain = trainer.strategy.module
        trainer.strategy.module = self  # type: ignore[assignment]

    def __call__(self, *args: Any) -> Any:
        if self.trainer.progress.step not in self.steps:
            return self.plain(*args)
        if self.where == "forward":
            bad = NonFiniteLogits("draft logits: NaN at position 3")
            with mock.patch("distillspec.training.module.chunked_loss", side_effect=bad):
                return self.plain(*args)
        result = self.plain(*args)
        return type(result)(**{**result.__dict__, "loss": result.loss * math.nan})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_bad_step_is_skipped_and_counted(make_trainer, tmp_path: Path, where: str) -> None:
    trainer = make_trainer(tmp_path)
    Poison(trainer, {1, 4}, where)
    seen: dict[int, torch.Tensor] = {}
    trainer.report = lambda progress, values: seen.setdefault(progress.step, weights(trainer)["lm_head.weight"].clone())
    result = trainer.run()
    assert result.bad_steps == 2
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(seen[4], seen[5])
    assert not torch.equal(seen[2], seen[3])
    assert bool(torch.isfinite(seen[6]).all())
    steps = {line["step"]: line for line in metrics(tmp_path) if "train/lr" in line}
    assert [steps[n]["train/bad_steps"] for n in range(1, 7)] == [0, 1, 1, 1, 2, 2]
    assert load_newest(tmp_path / "checkpoints")[0].bad_steps == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_bad_steps_in_a_row_end_the_run_with_one_line(make_trainer, where: str) -> None:
    trainer = make_trainer(train={"max_bad_steps": 3})
    Poison(trainer, {1, 2, 3}, where)
    with pytest.raises(
        RunError, match=r"3 steps in a row were not finite at step 3 .*lower train\.learning_rate"
    ) as failed:
        trainer.run()
    assert "\n" not in str(failed.value)


def test_weights_that_are_not_finite_end_the_run_with_one_line(make_trainer, target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[7] = math.nan
    trainer = make_trainer(draft=draft, train={"max_bad_steps": 2})
    with pytest.raises(RunError, match="2 steps in a row were not finite"):
        trainer.run()


def test_selection_trains_on_a_share_of_the_tokens(make_trainer, target: LanguageModel, samples: list[Sample]) -> None:
    reference = initialise_draft(DraftConfig(keep=[0, 1, 3]), target)
    loss = LossConfig(select_fraction=0.25, reference="given")
    bare = [Sample(s.prompt_id, s.domain, s.prompt_ids, s.response_ids) for s in samples]
    trainer = make_trainer(loss=loss, reference=reference, samples_=bare)
    batch = trainer.feed.take()
    _, chosen = trainer._weigh(batch)
    assert set(chosen.tolist()) == {0.0, 1.0}
    assert float(chosen.sum()) == pytest.approx(0.25 * batch.response_tokens, abs=1)
    before = weights(trainer)["lm_head.weight"].clone()
    trainer.run()
    assert not torch.equal(weights(trainer)["lm_head.weight"], before)


def test_selection_with_weights_that_are_not_finite_is_a_bad_step_too(make_trainer, target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[7] = math.nan
    loss = LossConfig(select_fraction=0.5, reference="given")
    trainer = make_trainer(draft=draft, loss=loss, reference=draft, train={"max_bad_steps": 2})
    with pytest.raises(RunError, match="2 steps in a row were not finite"):
        trainer.run()


@pytest.mark.parametrize(("loss", "signal", "forwards"), [("ce", False, 0), ("fkl", False, 3), ("fkl", True, 0)])
def test_the_teacher_runs_only_where_it_is_needed(
    make_trainer, target: LanguageModel, samples: list[Sample], loss: str, signal: bool, forwards: int
) -> None:
    bare = [Sample(s.prompt_id, s.domain, s.prompt_ids, s.response_ids) for s in samples]
    trainer = make_trainer(
        loss=LossConfig(name=loss),
        samples_=samples if signal else bare,
        train={"max_steps": 3},
        evaluate=lambda model: {"eval/alpha": 0.5},
    )
    calls: list[int] = []
    hook = target.decoder.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        trainer.run()
    finally:
        hook.remove()
    assert len(calls) == forwards


def test_micro_batches_add_up_to_one_large_batch(make_trainer, tmp_path: Path) -> None:
    """Two accumulated halves give the gradient of the whole, token-weighted."""
    parts = make_trainer(tmp_path / "parts", train={"accumulate": 2, "max_steps": 1, "eval_every": 1, "clip_norm": 1e9})
    feed = [parts.feed.take() for _ in range(2)]
    whole = make_trainer(tmp_path / "whole", train={"max_steps": 1, "eval_every": 1, "clip_norm": 1e9})
    norms = []
    for trainer, batches in ((parts, feed), (whole, [joined(feed)])):
        tokens, _, norm = trainer._gradients(batches)
        assert tokens == sum(batch.response_tokens for batch in feed)
        norms.append(norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for ours, theirs in zip(parts.module.parameters(), whole.module.parameters(), strict=True):
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def joined(batches: list[Any]) -> Any:
    """Batches of equally wide rows as one."""
    import dataclasses

    width = max(b.input_ids.shape[1] for b in batches)
    rows, index, first = [], [], 0
    for b in batches:
        pad = width - b.input_ids.shape[1]
        rows.append(
            (
                torch.nn.functional.pad(b.input_ids, (0, pad), value=2),
                torch.cat([b.position_ids, torch.arange(pad).expand(len(b.input_ids), pad)], 1),
            )
        )
        row, column = b.loss_index // b.input_ids.shape[1], b.loss_index % b.input_ids.shape[1]
        index.append((row + first) * width + column)
        first += len(b.input_ids)
    signals = [b.signal for b in batches]
    signal = type(signals[0])(
        signals[0].kind, *(torch.cat([getattr(s, name) for s in signals]) for name in ("ids", "logprobs", "tail"))
    )
    return dataclasses.replace(
        batches[0],
        input_ids=torch.cat([r[0] for r in rows]),
        position_ids=torch.cat([r[1] for r in rows]),
        loss_index=torch.cat(index),
        labels=torch.cat([b.labels for b in batches]),
        sample_index=torch.cat([b.sample_index for b in batches]),
        from_draft=torch.cat([b.from_draft for b in batches]),
        signal=signal,
    )


def test_gradients_above_the_limit_are_cut_to_it(make_trainer) -> None:
    trainer = make_trainer(train={"clip_norm": 1e-3, "max_steps": 2})
    after: list[float] = []
    update = trainer.strategy.update

    def watch() -> None:
        gradients = [p.grad for p in trainer.module.parameters() if p.grad is not None]
        after.append(float(torch.nn.utils.get_total_norm(gradients)))
        update()

    with mock.patch.object(trainer.strategy, "update", watch):
        trainer.run()
    logged = [line["train/grad_norm"] for line in metrics(trainer.folder) if "train/grad_norm" in line]
    assert min(logged) > 0.01  # what is logged is the norm before
    assert after == pytest.approx([1e-3, 1e-3], rel=1e-3)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"max_tokens": 70}, "tokens"), ({"max_minutes": 1e-6}, "minutes"), ({"max_steps": 2}, "steps")],
)
def test_a_run_ends_at_the_first_limit_it_meets(make_trainer, limit: dict[str, float], reason: str) -> None:
    trainer = make_trainer(train={"max_steps": 50, **limit})
    assert trainer.run().stopped_by == reason
    assert trainer.progress.step <= 3


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
    save = trainer._save
    trainer._save = lambda: (save(), clock.pass_by(3.0))  # type: ignore[method-assign]
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
