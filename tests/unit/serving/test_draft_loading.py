"""Where a draft lies: on its target's device, or on another one of the kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.draft_loading import device_of_drafts, load_drafts, placed

from ..models.state_drafts import state_draft

META = torch.device("meta")  # has no numbers, but a place


def test_a_draft_elsewhere_leaves_what_it_shared_with_its_target(target: LanguageModel) -> None:
    draft = state_draft("eagle", target)
    moved = placed(draft, META)
    assert {weight.device for weight in moved.model.parameters()} == {META}
    assert {weight.device.type for weight in target.model.parameters()} == {"cpu"}
    assert moved.device == META
    assert placed(moved, META) is moved


def test_drafts_are_loaded_onto_the_device_that_is_named(
    target: LanguageModel, draft: LanguageModel, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        save_draft(draft, tmp_path / name, target)
    one = load_drafts(tmp_path / "a", target, META)
    assert isinstance(one, LanguageModel)
    assert one.device == META
    near = load_drafts([tmp_path / "a", tmp_path / "b"], target)
    assert isinstance(near, dict)
    assert {name: each.device for name, each in near.items()} == {"a": target.device, "b": target.device}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", "draft.device=nowhere is no device"),
        ("cuda:1", "draft.device=cuda:1 is of another kind than cpu"),
    ],
)
def test_devices_that_cannot_be_are_refused(target: LanguageModel, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        device_of_drafts(name, target)


def test_a_device_that_the_machine_lacks_is_refused(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of_drafts(None, target) is None
    assert device_of_drafts("cpu", target) == torch.device("cpu")
    monkeypatch.setattr(LanguageModel, "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    there = replace(target)
    assert device_of_drafts("cuda:1", there) == torch.device("cuda", 1)
    assert device_of_drafts("cuda", there) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"draft.device=cuda:2: there are 2 CUDA devices"):
        device_of_drafts("cuda:2", there)
