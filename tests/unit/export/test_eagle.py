"""EAGLE-3 exports: another engine's arithmetic over the folder gives the draft's logits."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import distillspec.export.eagle as eagle_module
from distillspec.config import DraftConfig
from distillspec.errors import ConfigError, RunError
from distillspec.export import export_draft
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft
from distillspec.models.features import read_states
from distillspec.models.own_weights import own_embeddings

from ..models.state_drafts import drafted_logits, state_draft
from .eagle_engine import EagleEngine

KEPT = torch.arange(0, 259, 3)
TEXT = torch.tensor([1, 72, 80, 91, 40, 3, 17, 200, 9, 33, 121, 5])
DRAFTED = [7, 150, 3]
FORMATS = ("vllm", "sglang", "speculators")
DOUBLE = torch.float64

RandomModel = Callable[..., LanguageModel]


def saved(folder: Path, target: LanguageModel, kind: str = "eagle", kept_ids: Tensor | None = None) -> Path:
    """Write a draft of float32 weights for `target`."""
    draft = state_draft(kind, target, kept_ids)
    draft.model.float()
    save_draft(draft, folder, target)
    return folder


def states_of(target: LanguageModel, tokens: Tensor, ids: list[int]) -> Tensor:
    return read_states(target, tokens[None], torch.arange(len(tokens))[None], ids)[0]


@torch.no_grad()
def ours_from_the_second_token(draft: LanguageModel, target: LanguageModel, drafted: list[int]) -> list[Tensor]:
    """Return logits `[V]` at the end of `TEXT`, then after each token of `drafted`, over the target's ids."""
    assert draft.state_input is not None
    tokens, found = TEXT[1:], []
    fed = draft.state_input.fuse(states_of(target, TEXT, list(draft.state_ids)))[:-1]
    for token in [*drafted, 0]:
        last = draft.last_states(tokens[None], torch.arange(len(tokens))[None], fed[None])
        found.append(draft.full_width(draft.head.logits(draft.normed(last))[0, -1]))
        tokens, fed = torch.cat([tokens, torch.tensor([token])]), torch.cat([fed, last[0, -1:]])
    return found


@torch.no_grad()
def theirs(
    engine: EagleEngine, target: LanguageModel, drafted: list[int], *, first_token: bool = False
) -> list[Tensor]:
    """Return the same by the folder's arithmetic. `first_token` puts a state of zeros beside the text's first token."""
    fed, tokens, found = engine.combine(states_of(target, TEXT, engine.state_ids))[:-1], TEXT[1:], []
    if first_token:
        fed, tokens = torch.cat([torch.zeros_like(fed[:1]), fed]), TEXT
    for token in [*drafted, 0]:
        logits, after = engine.forward(tokens, fed)
        found.append(logits[-1])
        tokens, fed = torch.cat([tokens, torch.tensor([token])]), torch.cat([fed, after[-1:]])
    return found


def embeddings_of(target: LanguageModel) -> Tensor:
    return target.model.get_input_embeddings().weight.detach()


@pytest.mark.numerics
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "truncated"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_another_engines_arithmetic_gives_the_drafts_logits(
    form: str, kept: Tensor | None, architecture: str, random_model: RandomModel, tmp_path: Path
) -> None:
    target = random_model(architecture, DOUBLE)
    folder = saved(tmp_path / "draft", target, kept_ids=kept)
    export_draft(folder, tmp_path / "out", form, target, dtype="float32")
    draft = load_draft(folder, target, dtype=DOUBLE)

    engine = EagleEngine(tmp_path / "out", embeddings_of(target))
    assert engine.state_ids == [1, 2, 3]  # the draft reads 1 and 3
    for own, other in zip(
        ours_from_the_second_token(draft, target, DRAFTED), theirs(engine, target, DRAFTED), strict=True
    ):
        torch.testing.assert_close(other[: len(own)], own, atol=1e-9, rtol=0)
        assert bool((other[len(own) :] == -torch.inf).all())  # padding of the head is never drafted


@pytest.mark.numerics
@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_more_states_than_three_in_any_order(form: str, random_model: RandomModel, tmp_path: Path) -> None:
    target = random_model("llama", DOUBLE)
    draft = initialise_draft(DraftConfig(kind="eagle", feature_ids=[4, 1, 0, 2]), target)
    with torch.no_grad():
        draft.model.state_input.fc.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    save_draft(draft, tmp_path / "draft", target)
    export_draft(tmp_path / "draft", tmp_path / "out", form, target, dtype="float32")
    engine = EagleEngine(tmp_path / "out", embeddings_of(target))
    assert engine.state_ids == [0, 1, 2, 4]
    loaded = load_draft(tmp_path / "draft", target, dtype=DOUBLE)
    own, other = ours_from_the_second_token(loaded, target, [])[0], theirs(engine, target, [])[0]
    torch.testing.assert_close(other[: len(own)], own, atol=1e-9, rtol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_norms_of_states_are_refused_in_a_line(form: str, random_model: RandomModel, tmp_path: Path) -> None:
    target = random_model("llama")
    folder = saved(tmp_path / "draft", target, "normed eagle")
    with pytest.raises(ConfigError, match=rf"draft.state_norms=true.* format={form} does; .*state_norms=false") as told:
        export_draft(folder, tmp_path / "out", form, target)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.numerics
@pytest.mark.parametrize("kind", ["two layers of eagle", "scaled eagle"])
@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_layers_behind_the_first_and_scaled_states_are_a_llamas(
    form: str, kind: str, random_model: RandomModel, tmp_path: Path
) -> None:
    target = random_model("llama", DOUBLE)
    folder = saved(tmp_path / "draft", target, kind)
    export_draft(folder, tmp_path / "out", form, target, dtype="float32")
    draft = load_draft(folder, target, dtype=DOUBLE)
    engine = EagleEngine(tmp_path / "out", embeddings_of(target))
    for own, other in zip(
        ours_from_the_second_token(draft, target, DRAFTED), theirs(engine, target, DRAFTED), strict=True
    ):
        torch.testing.assert_close(other[: len(own)], own, atol=1e-9, rtol=0)


@pytest.mark.numerics
def test_the_texts_first_token_is_all_that_engines_leave_out(random_model: RandomModel, tmp_path: Path) -> None:
    target = random_model("llama", DOUBLE)
    folder = saved(tmp_path / "draft", target)
    export_draft(folder, tmp_path / "out", "vllm", target, dtype="float32")
    served = drafted_logits(load_draft(folder, target, dtype=DOUBLE), target, TEXT.tolist(), DRAFTED)
    engine = EagleEngine(tmp_path / "out", embeddings_of(target))
    with_it = theirs(engine, target, DRAFTED[:-1], first_token=True)
    for own, other in zip(served, with_it, strict=True):
        torch.testing.assert_close(other[: len(own)], own, atol=1e-9, rtol=0)
    without = theirs(engine, target, DRAFTED[:-1])
    assert (without[0][: len(served[0])] - served[0]).abs().max() > 1e-4


def test_maps_of_ids_are_offsets_and_a_mask(target: LanguageModel, tmp_path: Path) -> None:
    folder = saved(tmp_path / "draft", target, kept_ids=KEPT)
    export_draft(folder, tmp_path / "out", "vllm", target)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights["d2t"] + torch.arange(len(KEPT)), KEPT)
    assert weights["t2d"].dtype is torch.bool
    assert torch.equal(weights["t2d"].nonzero().flatten(), KEPT)
    assert weights["lm_head.weight"].shape[0] == len(KEPT)
    assert len(weights["t2d"]) == json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 264
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.bfloat16}
    assert "embed_tokens.weight" not in weights


def test_embeddings_that_were_trained_go_with_the_draft(random_model: RandomModel, tmp_path: Path) -> None:
    target = random_model("llama", DOUBLE)
    draft = state_draft("eagle", target)
    own_embeddings(draft.model)
    with torch.no_grad():
        draft.model.get_input_embeddings().weight.mul_(1.5).add_(0.1)
    draft.model.float()
    save_draft(draft, tmp_path / "draft", target)
    export_draft(tmp_path / "draft", tmp_path / "out", "vllm", target)
    export_draft(tmp_path / "draft", tmp_path / "exact", "vllm", target, dtype="float32")

    engine = EagleEngine(tmp_path / "exact", torch.zeros(1))
    loaded = load_draft(tmp_path / "draft", target, dtype=DOUBLE)
    own, other = ours_from_the_second_token(loaded, target, [])[0], theirs(engine, target, [])[0]
    torch.testing.assert_close(other[: len(own)], own, atol=1e-9, rtol=0)
    with pytest.raises(ConfigError, match="input embeddings of its own"):
        export_draft(tmp_path / "draft", tmp_path / "no", "sglang", target)


def test_embeddings_that_their_module_scales_are_written_as_they_are_read(
    random_model: RandomModel, tmp_path: Path
) -> None:
    target = random_model("gemma3_text")
    folder = saved(tmp_path / "draft", target)
    export_draft(folder, tmp_path / "rounded", "vllm", target)
    export_draft(folder, tmp_path / "out", "vllm", target, dtype="float32")
    engine = EagleEngine(tmp_path / "out", torch.zeros(1))
    scaled = target.model.get_input_embeddings()(TEXT).double()
    torch.testing.assert_close(engine.table[TEXT], scaled, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(embeddings_of(target)[TEXT].double(), scaled, atol=1e-3)


def test_the_target_keeps_its_embeddings_exact(target: LanguageModel, tmp_path: Path) -> None:
    before = embeddings_of(target).clone()
    result = export_draft(saved(tmp_path / "draft", target), tmp_path / "out", "vllm", target)
    assert torch.equal(embeddings_of(target), before)
    assert result.max_abs_error < 1e-4 < result.rounding_error
    assert result.argmax_agreement > 0.9
    assert (result.dtype, result.rows, result.learnt, result.stray_mass) == ("bfloat16", 264, 259, 0.0)


def test_partial_rotation_of_the_target_is_not_handed_on(random_model: RandomModel, tmp_path: Path) -> None:
    target = random_model("llama", DOUBLE)
    draft = state_draft("eagle", target)
    draft.model.config.rope_parameters["partial_rotary_factor"] = 0.5  # a plain Llama passes it over
    draft.model.float()
    save_draft(draft, tmp_path / "draft", target)
    export_draft(tmp_path / "draft", tmp_path / "out", "vllm", target)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_command_names_the_method_and_the_folder(form: str, target: LanguageModel, tmp_path: Path) -> None:
    out = tmp_path / "a folder"
    result = export_draft(saved(tmp_path / "draft", target), out, form, target, speculation_length=3)
    words = shlex.split(result.serve)
    if form == "sglang":
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert flags["--speculative-algorithm"] == "EAGLE3"
        assert flags["--speculative-draft-model-path"] == str(out)
        assert flags["--speculative-num-steps"] == "3"
    else:
        speculative = json.loads(words[words.index("--speculative-config") + 1])
        assert speculative == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    assert any("second token" in note for note in result.notes)
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]


def test_speculators_reads_how_the_draft_is_used(target: LanguageModel, tmp_path: Path) -> None:
    export_draft(saved(tmp_path / "draft", target), tmp_path / "out", "speculators", target, speculation_length=5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    (method,) = config["speculators_config"]["proposal_methods"]
    assert method == {"proposal_type": "greedy", "speculative_tokens": 5}
    assert config["speculators_config"]["default_proposal_method"] == "greedy"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["rope_theta"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in weights


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        ("eagle", "hf", "transformers has no such class; use format=vllm, sglang or speculators"),
        ("features", "vllm", r"adds the target's states to its embeddings \(draft.features=true\)"),
        ("two layers of eagle", "sglang", "has 2 layers, and SGLang"),
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


@pytest.mark.parametrize("damage", ["value", "lost", "unknown"])
def test_a_folder_that_reads_back_differently_leaves_nothing_behind(
    damage: str, target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(folder: Path) -> None:
        weights: dict[str, Any] = load_file(folder / "model.safetensors")
        if damage == "value":
            weights["midlayer.hidden_norm.weight"] *= 1.1
        elif damage == "lost":
            del weights["midlayer.mlp.up_proj.weight"]
        else:
            weights["midlayer.extra.weight"] = torch.ones(1)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    folder = saved(tmp_path / "draft", target)
    monkeypatch.setattr(eagle_module, "make_readable_for_transformers_4", corrupt)
    message = "does not give the draft's logits" if damage == "value" else "lacks weights, or has unknown ones"
    with pytest.raises(RunError, match=message):
        export_draft(folder, tmp_path / "out", "vllm", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def test_a_draft_that_is_not_finite_is_an_error_of_the_run(target: LanguageModel, tmp_path: Path) -> None:
    draft = state_draft("eagle", target)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[5] = float("nan")
    save_draft(draft, tmp_path / "draft", target)
    with pytest.raises(RunError, match="not finite"):
        export_draft(tmp_path / "draft", tmp_path / "out", "vllm", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]
