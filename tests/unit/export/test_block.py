"""Exports of blocks: P-EAGLE's arithmetic over the folder gives the draft's logits at all positions of a block."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import distillspec.export.block as block_module
from distillspec.errors import ConfigError, RunError
from distillspec.export import export_draft
from distillspec.export.block import free_id
from distillspec.models import LanguageModel, load_draft

from ..models.middle_llama import llama
from .eagle_engine import EagleEngine
from .test_eagle import DOUBLE, KEPT, TEXT, embeddings_of, saved, states_of

RandomModel = Callable[..., LanguageModel]
KIND, MASKS = "block of one mask", 3


def mask_of(folder: Path) -> int:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if "mask_token_id" in config:
        return config["mask_token_id"]
    assert config["pard_token"] == config["ptd_token_id"]
    return config["pard_token"]


@torch.no_grad()
def ours(draft: LanguageModel, target: LanguageModel) -> Tensor:
    """Return logits `[4, V]` of a block behind `TEXT`, which the draft begins at its second token."""
    assert draft.state_input is not None
    fed = draft.state_input.fuse(states_of(target, TEXT, list(draft.state_ids)))[:-1]
    tokens = torch.cat([TEXT[1:], -1 - torch.arange(MASKS)])[None]
    fed = torch.cat([fed, fed.new_zeros(MASKS, fed.shape[1])])[None]
    last = draft.last_states(tokens, torch.arange(tokens.shape[1])[None], fed)[0, -1 - MASKS :]
    return draft.full_width(draft.head.logits(draft.head_input(last)))


@torch.no_grad()
def theirs(folder: Path, target: LanguageModel) -> Tensor:
    """Return the same by the folder alone: mask tokens beside the fused `mask_hidden`, all read at once."""
    engine = EagleEngine(folder, torch.zeros(1))
    fed = engine.combine(states_of(target, TEXT, engine.state_ids))[:-1]
    mask = engine.combine(engine.weights["mask_hidden"].view(1, -1))
    tokens = torch.cat([TEXT[1:], torch.full((MASKS,), mask_of(folder))])
    return engine.forward(tokens, torch.cat([fed, mask.expand(MASKS, -1)]))[0][-1 - MASKS :]


@pytest.mark.numerics
@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "truncated"])
def test_another_engines_arithmetic_gives_the_blocks_logits(
    form: str, kept: Tensor | None, random_model: RandomModel, tmp_path: Path
) -> None:
    target = random_model("llama", DOUBLE)
    before = embeddings_of(target).clone()
    folder = saved(tmp_path / "draft", target, KIND, kept)
    result = export_draft(folder, tmp_path / "out", form, target, dtype="float32")
    assert result.max_abs_error < 1e-4
    own, other = ours(load_draft(folder, target, dtype=DOUBLE), target), theirs(tmp_path / "out", target)
    finite = own.isfinite()
    torch.testing.assert_close(other[:, : own.shape[1]][finite], own[finite], atol=1e-4, rtol=0)
    assert not other[:, : own.shape[1]][~finite].isfinite().any()
    assert torch.equal(embeddings_of(target), before)


def test_the_folder_has_what_loaders_look_for(target: LanguageModel, tmp_path: Path) -> None:
    folder = saved(tmp_path / "draft", target, KIND)
    result = export_draft(folder, tmp_path / "out", "vllm", target, speculation_length=9)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    width = target.head.weight.shape[1]
    assert weights["mask_hidden"].shape == (1, 1, 3 * width)
    assert weights["embed_tokens.weight"].shape == (config["vocab_size"], width)
    assert not any("masks" in name or "state_input" in name for name in weights)
    assert mask_of(tmp_path / "out") == target.identity.vocab_size, "padding, where there is some"
    words = shlex.split(result.serve)
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "eagle3",
        "model": str(tmp_path / "out"),
        "num_speculative_tokens": 4,
        "parallel_drafting": True,
    }
    export_draft(folder, tmp_path / "spec", "speculators", target)
    spec = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert spec["speculators_model_type"] == spec["speculators_config"]["algorithm"] == "peagle"
    assert spec["architectures"] == ["PEagleSpeculator"]


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        ("block", "vllm", r"a Markov head of 64 \(draft.markov=0 leaves it out\) and a mask for each position"),
        (KIND, "sglang", r"SGLang's blocks \(DFlash\) read the text by its states; use format=vllm or speculators"),
        (KIND, "hf", "transformers has no such class"),
    ],
)
def test_what_an_engine_lacks_is_refused_in_one_line(
    kind: str, form: str, message: str, target: LanguageModel, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "draft", target, kind)
    with pytest.raises(ConfigError, match=message) as refused:
        export_draft(folder, tmp_path / "out", form, target)
    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_the_mask_takes_an_id_that_no_text_needs(tmp_path: Path) -> None:
    table = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=torch.zeros(10, 2)))
    special = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=1, all_special_ids=[0, 1, 7, 12])
    draft: Any = SimpleNamespace(model=table, text_tokenizer=special)
    target: Any = SimpleNamespace(identity=SimpleNamespace(vocab_size=10), stop_ids=(1,), name="t")
    assert free_id(draft, target) == 7
    whole = llama()  # a row of its table for each id, and special ones that all mean something
    with pytest.raises(ConfigError, match="has an id for text in each row of its embeddings"):
        export_draft(saved(tmp_path / "draft", whole, KIND), tmp_path / "out", "vllm", whole)


@pytest.mark.parametrize("damaged", ["mask_hidden", "embed_tokens.weight"])
def test_a_folder_that_reads_back_differently_leaves_nothing_behind(
    damaged: str, target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(folder: Path) -> None:
        weights: dict[str, Any] = load_file(folder / "model.safetensors")
        weights[damaged] *= 1.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    folder = saved(tmp_path / "draft", target, KIND)
    monkeypatch.setattr(block_module, "make_readable_for_transformers_4", corrupt)
    with pytest.raises(RunError, match="does not give the draft's logits"):
        export_draft(folder, tmp_path / "out", "vllm", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]
