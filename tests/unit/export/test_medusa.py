"""Medusa exports: vLLM's arithmetic over the folder gives the draft's logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

import distillspec.export.medusa as medusa_module
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError, RunError
from distillspec.export import export_draft
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft

from ..models.state_drafts import drafted_logits, state_draft

KEPT = torch.arange(0, 259, 3)
TEXT = [1, 72, 80, 91, 40, 3, 17, 200, 9, 33, 121, 5]
DRAFTED = [9, 3, 0, 12]
DOUBLE = torch.float64

RandomModel = Callable[..., LanguageModel]


@pytest.fixture
def target(random_model: RandomModel) -> LanguageModel:
    return random_model("llama", DOUBLE)


def saved(folder: Path, target: LanguageModel, kind: str = "medusa", kept_ids: Tensor | None = None) -> Path:
    draft = state_draft(kind, target, kept_ids)
    draft.model.float()
    save_draft(draft, folder, target)
    return folder


@torch.no_grad()
def vllm_logits(folder: Path, state: Tensor) -> list[Tensor]:
    """Return logits `[V]` of each head on the target's state `[D]` behind its final norm, as vLLM 0.32 does."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    found = []
    for head in range(config["num_heads"]):
        hidden = state
        for layer in range(config["num_hidden_layers"]):
            hidden = hidden + silu(weights[f"blocks.{head}.layers.{layer}.weight"].double() @ hidden)
        found.append(weights["lm_head.weight"].double() @ hidden)
    return found


@pytest.mark.numerics
@pytest.mark.parametrize("kept", [None, KEPT])
def test_vllms_arithmetic_on_the_folder_gives_the_drafts_logits(
    kept: Tensor | None, target: LanguageModel, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "draft", target, kept_ids=kept)
    result = export_draft(folder, tmp_path / "out", "vllm", target, dtype="float32")
    draft = load_draft(folder, target, dtype=DOUBLE)

    read = torch.tensor([TEXT[:-1]])  # the target has not read the newest token
    state = target.hidden(read, torch.arange(len(TEXT) - 1)[None])[0, -1].detach()
    theirs = vllm_logits(tmp_path / "out", state)
    ours = drafted_logits(draft, target, TEXT, DRAFTED)
    learnt = torch.arange(draft.width) if kept is None else kept
    assert len(theirs) == len(ours) == 4
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(other[learnt], own, atol=1e-9, rtol=0)
    assert '"method":"medusa"' in result.serve
    assert '"num_speculative_tokens":4' in result.serve


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_untrained_heads_read_what_the_targets_head_reads(family: str, random_model: RandomModel) -> None:
    target = random_model(family, DOUBLE)
    draft = initialise_draft(DraftConfig(kind="medusa"), target)
    draft.model.to(DOUBLE)
    ids, places = torch.tensor([TEXT]), torch.arange(len(TEXT))[None]
    own = drafted_logits(draft, target, [*TEXT, 7], DRAFTED)
    with torch.no_grad():
        theirs = target.logits(ids, places)[0, -1]
    for logits in own:
        torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=0)  # the draft was made in float32


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        ("medusa", "hf", "format=hf has no such draft; use format=vllm"),
        ("medusa", "sglang", "format=sglang has no such draft; use format=vllm"),
        ("medusa", "speculators", "format=speculators has no such draft; use format=vllm"),
        ("hydra", "vllm", r"read drafted tokens \(draft.sequential=true\)"),
    ],
)
def test_what_the_format_lacks_is_refused_in_one_line(
    kind: str, form: str, message: str, target: LanguageModel, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "draft", target, kind)
    with pytest.raises(ConfigError, match=message) as refused:
        export_draft(folder, tmp_path / "out", form, target)
    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_heads_on_another_state_are_refused(target: LanguageModel, tmp_path: Path) -> None:
    save_draft(initialise_draft(DraftConfig(kind="medusa", feature_ids=[1]), target), tmp_path / "draft", target)
    with pytest.raises(ConfigError, match="reads other states"):
        export_draft(tmp_path / "draft", tmp_path / "out", "vllm", target)


def test_a_folder_that_reads_back_differently_leaves_nothing_behind(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["blocks.1.layers.0.weight"][0, 0] += 1.0
        save_file(weights, folder / "model.safetensors")

    folder = saved(tmp_path / "draft", target)
    monkeypatch.setattr(medusa_module, "make_readable_for_transformers_4", corrupt)
    with pytest.raises(RunError, match="does not give the draft's logits"):
        export_draft(folder, tmp_path / "out", "vllm", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("kept", [None, KEPT])
def test_the_folder_has_what_vllm_asks_for(kept: Tensor | None, target: LanguageModel, tmp_path: Path) -> None:
    folder = saved(tmp_path / "draft", target, kept_ids=kept)
    result = export_draft(folder, tmp_path / "out", "vllm", target, dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    rows = target.model.config.vocab_size
    # vLLM 0.32 refuses a checkpoint with a token_map, so the vocabulary must not be a truncated one.
    assert weights.keys() == {"lm_head.weight", *(f"blocks.{k}.layers.0.weight" for k in range(config["num_heads"]))}
    assert config["truncated_vocab_size"] == config["vocab_size"] == result.rows == rows
    assert weights["lm_head.weight"].shape == (rows, target.model.config.hidden_size)
    assert any("written at full width" in line for line in result.warnings) == (kept is not None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ids_that_the_heads_never_learnt_are_improbable(dtype: str, target: LanguageModel, tmp_path: Path) -> None:
    folder = saved(tmp_path / "draft", target, kept_ids=KEPT)
    result = export_draft(folder, tmp_path / "out", "vllm", target, dtype=dtype)
    assert result.learnt == len(KEPT)
    assert 0 < result.stray_mass < result.stray_mass_before


def test_zeros_are_written_where_a_fitted_row_is_more_probable(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "draft", target, kept_ids=KEPT)
    monkeypatch.setattr(medusa_module, "improbable_row", lambda draft, hidden, unlearnt: 10 * hidden.mean(0))
    export_draft(folder, tmp_path / "out", "vllm", target, dtype="float32")
    head = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    assert not head[1].any()
    assert head[0].any()
