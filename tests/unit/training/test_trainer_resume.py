"""Interrupted runs resume bit for bit, from the newest intact checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.errors import Interrupted, RunError
from distillspec.models import LanguageModel
from distillspec.training.checkpoint import Generators, load_newest, save_checkpoint
from distillspec.training.trainer import Trainer
from distillspec.types import Sample

from .runs import assert_equal_weights, metrics, stop_at, untimed


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


def test_a_stop_in_the_last_step_is_heard(make_trainer, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.run()
    last = make_trainer(tmp_path / "parts", **stop_at(whole.progress.step))
    with pytest.raises(Interrupted):
        last.run()
    again = make_trainer(tmp_path / "parts")
    again.resume()
    result = again.run()
    assert (result.progress.step, result.best) == (whole.progress.step, whole.best)
    assert_equal_weights(again, whole)


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
    """The refresh depends on the draft's weights. Between refreshes the saved samples are used."""

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


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(make_trainer, tmp_path: Path) -> None:
    make_trainer(tmp_path).run()
    (tmp_path / "checkpoints" / "step-00000006" / "state.pt").write_bytes(b"")
    again = make_trainer(tmp_path, train={"save_every": 1}, **stop_at(5))
    again.resume()
    with pytest.raises(Interrupted):
        again.run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000005"]
