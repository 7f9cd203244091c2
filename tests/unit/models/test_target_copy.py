"""The copy of the target that trains, and the folder that it becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.half_weights import fits_half
from distillspec.models.target_copy import TargetCopy, save_target


def step(copy: TargetCopy) -> None:
    with torch.no_grad():
        for parameter in copy.trained.layers.parameters():
            parameter += 0.01 * torch.randn(parameter.shape)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_only_the_layers_train(random_model: Callable[..., LanguageModel], kind: str) -> None:
    target = random_model(kind, torch.bfloat16)
    copy = TargetCopy(target, "new")
    learning = {id(p) for p in copy.trained.model.parameters() if p.requires_grad}
    assert learning == {id(p) for p in copy.trained.layers.parameters()}
    assert copy.trained.dtype == torch.float32
    step(copy)
    new = copy.refresh()
    assert new.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in new.model.parameters())
    layers = {id(p) for p in new.layers.parameters()}
    for own, old in zip(new.model.parameters(), target.model.parameters(), strict=True):
        assert torch.equal(own, old) != (id(own) in layers)


def test_its_hash_is_the_targets_until_it_moves(target: LanguageModel) -> None:
    copy = TargetCopy(target, "new")
    assert copy.refresh().identity == target.identity
    step(copy)
    assert copy.served.identity == target.identity, "as of the last refresh"
    assert copy.refresh().identity.weights_hash != target.identity.weights_hash


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_loaded_as_a_target(target: LanguageModel, tmp_path: Path, dtype: str) -> None:
    save_target(target, tmp_path / "old")
    old = load_target(TargetConfig(path=str(tmp_path / "old"), dtype=dtype, device="cpu"))
    assert old.identity == target.identity
    copy = TargetCopy(old, "new")
    step(copy)
    new = copy.refresh()
    save_target(new, tmp_path / "new")
    loaded = load_target(TargetConfig(path=str(tmp_path / "new"), dtype=dtype, device="cpu"))
    assert loaded.identity == new.identity
    assert loaded.stop_ids == old.stop_ids
    text = torch.tensor([[1, 20, 30, 40, 50]])
    assert torch.equal(loaded.logits(text), new.logits(text))
    assert not torch.equal(loaded.logits(text), old.logits(text))


@torch.no_grad()
def test_a_published_target_stays_one_that_sixteen_bits_hold(random_model: Callable[..., LanguageModel]) -> None:
    """In float32 it is served in C++ only so."""
    target = random_model("llama", torch.bfloat16)
    target.model.float()
    copy = TargetCopy(target, "new")
    copy.trained.layers[0].mlp.up_proj.weight[0, :4] = torch.tensor([1e-9, 2e-7, -3e-8, 0.0])
    step(copy)
    new = copy.refresh()
    for own, trained in zip(new.layers.parameters(), copy.trained.layers.parameters(), strict=True):
        if own.ndim == 2:
            assert fits_half(own, exact=True)
            assert float((own - trained).abs().max()) <= 2**-11 * float(trained.abs().max())
        else:
            assert torch.equal(own, trained)
    drawn = random_model("llama", torch.float32)
    other = TargetCopy(drawn, "new")
    step(other)
    pairs = zip(other.refresh().layers.parameters(), other.trained.layers.parameters(), strict=True)
    assert all(torch.equal(own, trained) for own, trained in pairs)
