"""Packed products are the plain ones, for any number of rows, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model, tiny_tokenizer
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.execution import packed_linear
from distillspec.serving.execution.packed_linear import PackedLinear, PackedLinears, product

from ..conftest import hf_greedy, prompts

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def wide() -> LanguageModel:
    """Wide enough that its layers are worth packing."""
    model = tiny_model(264, layers=2, hidden=256)
    return wrap(model.requires_grad_(False), tiny_tokenizer(), "wide")


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(
        torch.bfloat16,
        id="bfloat16",
        marks=pytest.mark.skipif(
            not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no instructions for bfloat16"
        ),
    ),
]


@pytest.fixture
def always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack whatever the trial of speed says."""
    monkeypatch.setattr(packed_linear, "packing_is_faster", lambda dtype, weights: True)


def wide_model(dtype: torch.dtype) -> LanguageModel:
    return wrap(tiny_model(264, layers=1, hidden=256).requires_grad_(False).to(dtype), tiny_tokenizer(), "wide")


@needs_onednn
@pytest.mark.usefixtures("always_packed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 40, 100])
def test_products_are_the_plain_ones(dtype: torch.dtype, rows: int) -> None:
    model = wide_model(dtype)
    packs = PackedLinears(model)
    weight, bias = model.layers[0].mlp.gate_proj.weight, torch.randn(model.layers[0].mlp.gate_proj.out_features)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(dtype)
    wanted = x.double() @ weight.double().T + bias.to(dtype).double()
    found = packs.linear(x, weight, bias.to(dtype))
    assert found.dtype == dtype
    scale = x.double().abs() @ weight.double().abs().T + bias.to(dtype).double().abs()
    assert ((found.double() - wanted).abs() <= 4 * torch.finfo(dtype).eps * scale).all()
    assert packs.linear(x[None], weight).shape == (1, rows, len(weight))
    assert packs.linear(x[:, ::2].contiguous(), torch.randn(3, 128, dtype=dtype)).shape == (rows, 3), "not packed"


@needs_onednn
@pytest.mark.usefixtures("always_packed")
def test_tied_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(torch.float32)
    one = model.layers[0].mlp
    one.up_proj.weight = one.gate_proj.weight
    packs = PackedLinears(model)
    packs.attach()
    layers = [m for m in model.decoder.modules() if isinstance(m, torch.nn.Linear)]
    own = {id(layer.packed) for layer in layers if isinstance(layer, PackedLinear)}
    large = {layer.weight.data_ptr() for layer in layers if layer.weight.numel() >= packed_linear.SMALLEST}
    assert len(own) == len(large) > 1
    assert one.up_proj.packed is one.gate_proj.packed
    packs.detach()


@needs_onednn
@pytest.mark.parametrize("ratio", [0.9, 1.1])
def test_the_faster_product_is_chosen_and_logged(
    ratio: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter([1.0, ratio] * 100)
    monkeypatch.setattr(packed_linear, "seconds", lambda run: next(seconds))
    packed_linear.forget_trials()
    with caplog.at_level("INFO"):
        packs = PackedLinears(wide_model(torch.float32))
    packed_linear.forget_trials()
    assert bool(packs) == (ratio < 1)
    assert f"{ratio:.2f} times the plain" in caplog.text


@needs_onednn
def test_a_cpu_without_the_instructions_keeps_plain_products(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("needs avx512")

    monkeypatch.setattr(packed_linear, "pack", refuse)
    packed_linear.forget_trials()
    model = wide_model(torch.float32)
    with caplog.at_level("INFO"):
        packs = PackedLinears(model)
    packed_linear.forget_trials()
    packs.attach()
    assert "weights are not packed: needs avx512" in caplog.text
    assert not any(isinstance(module, PackedLinear) for module in model.model.modules())


@needs_onednn
@pytest.mark.usefixtures("always_packed")
def test_an_engine_uses_them_and_gives_the_model_back(wide: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(4)
    wanted = [hf_greedy(wide, prompt, 10) for prompt in asked]
    used: list[int] = []

    def counted(x: torch.Tensor, packed: Any, bias: Any = None) -> torch.Tensor:
        used.append(x.numel() // x.shape[-1])
        return product(x, packed, bias)

    monkeypatch.setattr(packed_linear, "product", counted)
    engine = Engine(wide, None, EngineSettings(max_slots=4, max_model_len=300, proposer="prompt_lookup"))
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=10))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert used
    engine.close()
    assert not any(isinstance(module, PackedLinear) for module in wide.model.modules())


def test_other_formats_are_left_alone() -> None:
    model = wrap(tiny_model(264, layers=1, hidden=64).double(), tiny_tokenizer(), "double")
    assert not PackedLinears.helps(model)
