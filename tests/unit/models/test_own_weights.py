"""Drafts that read states, on disk: their own weights only, and bit for bit the same when loaded with their target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.files import write_folder
from distillspec.models import LanguageModel, initialise_draft, load_draft, read_metadata, save_draft
from distillspec.models.features import read_states
from distillspec.models.unrolling import unrolled
from distillspec.training.optimizer import choose_trainable

from .state_drafts import KINDS, state_draft

READ = torch.tensor([[1, 20, 30, 40, 50, 60]]), torch.arange(6)[None]


def drafted(draft: LanguageModel, target: LanguageModel) -> torch.Tensor:
    hidden = unrolled(draft, *READ, read_states(target, *READ, draft.state_ids), [torch.arange(6)] * 2)
    return draft.head.logits(torch.stack(hidden))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_saved_draft_comes_back_without_the_targets_embeddings(
    target: LanguageModel, kept_ids: torch.Tensor, tmp_path: Path, kind: str, cut: bool
) -> None:
    draft = state_draft(kind, target, kept_ids if cut else None)
    save_draft(draft, tmp_path / "draft", target)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert not any("embed_tokens" in name for name in stored)
    loaded = load_draft(tmp_path / "draft", target)
    assert torch.equal(drafted(loaded, target), drafted(draft, target))
    assert loaded.width == draft.width
    assert loaded.state_ids == draft.state_ids
    shared = loaded.model.get_input_embeddings().weight
    assert shared.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    reads = read_metadata(tmp_path / "draft")["reads"]
    assert reads["state_ids"] == list(draft.state_ids)
    assert "after i layers" in reads["convention"]


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_the_precision_of_the_states_is_recorded(target: LanguageModel, tmp_path: Path, precision: str | None) -> None:
    draft = state_draft("features", target)
    assert draft.state_input is not None
    draft.state_input.precision = precision
    save_draft(draft, tmp_path / "draft", target)
    assert read_metadata(tmp_path / "draft")["reads"].get("precision") == precision
    again = load_draft(tmp_path / "draft", target).state_input
    assert again is not None
    assert again.precision == precision


def test_norms_of_states_are_recorded_and_stored(target: LanguageModel, tmp_path: Path) -> None:
    draft = state_draft("normed eagle", target)
    save_draft(draft, tmp_path / "draft", target)
    assert read_metadata(tmp_path / "draft")["reads"]["norms"] is True
    loaded = load_draft(tmp_path / "draft", target).state_input
    assert loaded is not None
    assert loaded.norms is not None
    assert draft.state_input is not None
    assert torch.equal(loaded.norms.weight, draft.state_input.norms.weight)  # type: ignore[union-attr]
    save_draft(state_draft("eagle", target), tmp_path / "plain", target)
    plain = load_draft(tmp_path / "plain", target).state_input
    assert plain is not None
    assert plain.norms is None


def test_in_bfloat16_rotary_frequencies_stay_in_float32(target: LanguageModel, tmp_path: Path) -> None:
    save_draft(state_draft("eagle", target), tmp_path / "draft", target)
    loaded = load_draft(tmp_path / "draft", target, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.model.buffers()} == {torch.float32}


def test_it_needs_its_target(target: LanguageModel, tmp_path: Path) -> None:
    save_draft(state_draft("eagle", target), tmp_path / "draft", target)
    with pytest.raises(ConfigError, match="load it together with its target"):
        load_draft(tmp_path / "draft")


def test_a_missing_weight_is_named(target: LanguageModel, tmp_path: Path) -> None:
    save_draft(state_draft("eagle", target), tmp_path / "draft", target)

    def without_fusion(folder: Path) -> None:
        for file in (tmp_path / "draft").iterdir():
            if file.name not in ("model.safetensors", "sha256.json"):
                (folder / file.name).write_bytes(file.read_bytes())
        state = load_file(tmp_path / "draft" / "model.safetensors")
        del state["state_input.fc.weight"]
        save_file(state, folder / "model.safetensors")

    write_folder(tmp_path / "other", without_fusion)
    with pytest.raises(ConfigError, match=r"lacks weights.*state_input\.fc\.weight"):
        load_draft(tmp_path / "other", target)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "mistral"])
@torch.no_grad()
def test_four_families_have_drafts_of_both_kinds(
    random_model: Callable[..., LanguageModel], family: str, tmp_path: Path
) -> None:
    target = random_model(family)
    for kind in KINDS:
        draft = state_draft(kind, target)
        save_draft(draft, tmp_path / kind, target)
        assert torch.equal(drafted(load_draft(tmp_path / kind, target), target), drafted(draft, target))


@torch.no_grad()
def test_features_begin_at_what_the_draft_knew(target: LanguageModel) -> None:
    plain = initialise_draft(DraftConfig(layers=2), target)
    reading = initialise_draft(DraftConfig(layers=2, features=True), target)
    for logits in drafted(reading, target):
        torch.testing.assert_close(logits, plain.logits(READ[0])[0])


def test_embeddings_that_train_are_the_drafts_own(target: LanguageModel, tmp_path: Path) -> None:
    draft = initialise_draft(DraftConfig(kind="eagle"), target)
    theirs = target.model.get_input_embeddings().weight
    before = theirs.detach().clone()
    choose_trainable(draft, train_embeddings=True)
    own = draft.model.get_input_embeddings().weight
    assert own.requires_grad
    with torch.no_grad():
        own += 1
    assert torch.equal(theirs, before)
    save_draft(draft, tmp_path / "draft", target)
    assert torch.equal(load_draft(tmp_path / "draft", target).model.get_input_embeddings().weight, own)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"kind": "scratch", "features": True}, "draft.features=true adds"),
        ({"kind": "pruned", "feature_ids": [1]}, "has no part without draft.features=true"),
        ({"kind": "eagle", "feature_ids": []}, "names no state"),
        ({"kind": "eagle", "positions": 3}, "draft.positions=3 has no part in draft=eagle; add draft=medusa"),
        ({"kind": "pruned", "sequential": True}, "draft.sequential=True has no part in draft=pruned"),
        ({"kind": "medusa", "positions": 0}, "draft at least 1 token"),
        ({"kind": "block", "state_norms": True}, "draft.state_norms=True has no part in draft=block; add draft=eagle"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(words: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig(**words)


def test_hooks_of_shared_embeddings_are_not_the_targets(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(kind="eagle"), target)
    handle = draft.model.get_input_embeddings().register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            draft.model.get_input_embeddings()(READ[0])
        assert target.model.get_input_embeddings()(READ[0]).isfinite().all()
    finally:
        handle.remove()
