"""The accelerator of a run works on the target's device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.config import LauncherConfig, TargetConfig, TrainCommand, TrainConfig
from distillspec.training.strategies import choice


class MadeError(Exception):
    """Stands for an accelerator: none is made."""


@pytest.mark.parametrize(
    ("device", "launcher", "chosen"),
    [("cuda:1", "local", ["cuda:1"]), ("cuda", "local", []), ("cpu", "local", []), ("cuda:1", "ddp", [])],
)
def test_a_numbered_gpu_is_the_current_one_before_accelerate_takes_it(
    device: str, launcher: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[str] = []

    def accelerator(**settings: Any) -> None:
        raise MadeError

    monkeypatch.setattr(choice, "resolve_device", torch.device)
    monkeypatch.setattr(choice, "Accelerator", accelerator)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    config = TrainCommand(
        target=TargetConfig(path="tiny", device=device),
        train=TrainConfig(max_steps=1, dtype="float32"),
        launcher=LauncherConfig(launcher, 1),
    )
    with pytest.raises(MadeError):
        choice.make_accelerator(config, 8)
    assert current == chosen
