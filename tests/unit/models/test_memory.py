"""Giving memory to other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillspec.models.memory import moved_off_device


class FakeModel:
    """Weights on a device, and what was done to them."""

    def __init__(self, device: str, done: list[str]) -> None:
        self.device, self.done = torch.device(device), done
        self.model: Any = SimpleNamespace(to=lambda place: done.append(f"to {torch.device(place).type}"))


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", ["to cpu", "empty", "work", "to cuda"]), ("cpu", ["to cpu", "work", "to cpu"])],
)
def test_a_gpus_memory_is_given_back_before_others_need_it(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    with moved_off_device(FakeModel(device, done)):  # type: ignore[arg-type]
        done.append("work")
    assert done == expected


def test_the_model_is_back_after_a_failure() -> None:
    done: list[str] = []
    with pytest.raises(RuntimeError), moved_off_device(FakeModel("cpu", done)):  # type: ignore[arg-type]
        raise RuntimeError
    assert done == ["to cpu", "to cpu"]
