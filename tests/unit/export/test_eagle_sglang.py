"""EAGLE-3 exports for SGLang, as far as they can be loaded without it: names, shapes, ids and the target's states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.export import export_draft
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft

from .sglang_loader import SglangEagle3
from .test_eagle import KEPT, saved


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "truncated"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_each_weight_finds_its_parameter_and_each_parameter_a_weight(
    architecture: str, kept: Tensor | None, random_model: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    target = random_model(architecture)
    folder = saved(tmp_path / "draft", target, kept_ids=kept)
    export_draft(folder, tmp_path / "out", "sglang", target, dtype="float32")
    loaded, draft = SglangEagle3(tmp_path / "out"), load_draft(folder, target)
    assert loaded.unknown == []
    assert loaded.lacking == ["model.embed_tokens.weight"], "the target's are put in its place"
    assert loaded.captured_states == [1, 2, 3]
    assert loaded.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert loaded.config["tie_word_embeddings"] is False, "or it takes its embeddings for the head"
    assert loaded.config["num_hidden_layers"] == 1
    head = loaded.filled["lm_head.weight"][0]
    assert head is not None
    assert torch.equal(head, draft.head.weight.float())
    if kept is not None:
        assert loaded.hot_token_id is not None
        assert torch.equal(loaded.hot_token_id, kept)


def test_what_it_would_pass_over_is_seen(target: LanguageModel, tmp_path: Path) -> None:
    export_draft(saved(tmp_path / "draft", target), tmp_path / "out", "sglang", target)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    save_file(renamed, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    wrong = SglangEagle3(tmp_path / "out")
    assert wrong.unknown
    assert len(wrong.lacking) > 1


def test_a_draft_of_tokens_alone_is_a_model_of_its_own(target: LanguageModel, tmp_path: Path) -> None:
    """`STANDALONE` loads it as it would any Llama, which `export` has proved with transformers."""
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "draft", target)
    result = export_draft(tmp_path / "draft", tmp_path / "out", "sglang", target)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "STANDALONE" in result.serve
