"""A run's number format: the faster one here, tried once, kept by the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distillspec.commands.run_folder import open_run
from distillspec.composition import compose
from distillspec.training import precision
from distillspec.training.precision import bfloat16_ratio, with_settled_dtype


def settled(folder: Path, *words: str) -> str:
    return with_settled_dtype(compose("train", ["target.device=cpu", *words]), folder).train.dtype


def machine(monkeypatch: pytest.MonkeyPatch, units: bool, ratio: float) -> None:
    """Pretend that the CPU has bfloat16 units, or not, and that its products take `ratio` times float32's time."""
    auto = torch.bfloat16 if units else torch.float32
    monkeypatch.setattr(precision, "resolve_dtype", lambda name, device: auto)
    monkeypatch.setattr(precision, "bfloat16_ratio", lambda: ratio)


@pytest.mark.parametrize(
    ("units", "ratio", "dtype"),
    [(True, 0.5, "bfloat16"), (True, 0.95, "float32"), (True, 1.8, "float32"), (False, 0.5, "float32")],
)
def test_auto_is_the_format_that_multiplies_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, units: bool, ratio: float, dtype: str
) -> None:
    machine(monkeypatch, units, ratio)
    assert settled(tmp_path) == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_named_format_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str) -> None:
    monkeypatch.setattr(precision, "bfloat16_ratio", lambda: pytest.fail("tried"))
    assert settled(tmp_path, f"train.dtype={dtype}") == dtype


def test_a_resumed_run_keeps_its_format_on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, True, 0.5)
    open_run(tmp_path, with_settled_dtype(compose("train", ["target.device=cpu"]), tmp_path))
    machine(monkeypatch, True, 2.0)
    assert settled(tmp_path) == "bfloat16"
    assert settled(tmp_path / "another") == "float32"


def test_the_trial_is_over_in_a_moment() -> None:
    assert 0 < bfloat16_ratio() < 100
