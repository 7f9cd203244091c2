"""Packed weights are used where they fit, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel, packed_linear, product_trial
from distillspec.models.packed_linear import PackedLinear, PackedLinears
from distillspec.models.packed_products import KINDS, HalfProduct, OneDnnProduct, PackedProduct
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model, tiny_tokenizer
from distillspec.serving import Engine, EngineSettings, SamplingParams

from ..serving.conftest import hf_greedy, prompts

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def wide() -> LanguageModel:
    """Wide enough that its layers are worth packing, with weights as checkpoints have them."""
    return wide_model(torch.float32, layers=2)


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[PackedProduct]:
    """Pack by this kind, whatever the trial of speed says, and skip where the CPU has no instructions for it."""
    found: type[PackedProduct] = request.param
    try:
        found(torch.ones(64, 64))
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: (found,))
    return found


def wide_model(dtype: torch.dtype, layers: int = 1) -> LanguageModel:
    model = tiny_model(264, layers=layers, hidden=256).requires_grad_(False).to(torch.bfloat16).to(dtype)
    return wrap(model, tiny_tokenizer(), "wide")


@needs_onednn
def test_an_exact_model_whose_weights_need_more_than_16_bits_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: (HalfProduct, OneDnnProduct))
    model = wide_model(torch.float32)
    assert PackedLinears(model).kind is HalfProduct
    model.layers[0].mlp.gate_proj.weight[3, 5] = 1 / 3
    assert PackedLinears(model).kind is OneDnnProduct
    assert PackedLinears(model, exact=False).kind is HalfProduct, "drafts may be rounded"
    model.layers[0].mlp.gate_proj.weight[3, 5] = torch.inf
    assert PackedLinears(model, exact=False).kind is OneDnnProduct


@needs_onednn
def test_a_copy_that_does_not_fit_into_memory_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(torch.float32)
    large = {w.data_ptr(): w.numel() for w in [model.head.weight, *model.decoder.parameters()] if w.dim() == 2}
    embeddings = model.model.get_input_embeddings().weight
    if embeddings.data_ptr() != model.head.weight.data_ptr():
        del large[embeddings.data_ptr()]
    elements = sum(count for count in large.values() if count >= packed_linear.SMALLEST)
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: (OneDnnProduct, HalfProduct))
    for free, wanted in ((8 * elements, OneDnnProduct), (8 * elements - 1, HalfProduct), (4 * elements - 1, None)):
        monkeypatch.setattr(packed_linear, "free_bytes", lambda device, free=free: free)
        assert PackedLinears(model).kind is wanted


@needs_onednn
@pytest.mark.usefixtures("kind")
def test_tied_weights_are_packed_once() -> None:
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
def test_an_engine_uses_them_and_gives_the_model_back(
    wide: LanguageModel, kind: type[PackedProduct], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(4)
    wanted = [hf_greedy(wide, prompt, 10) for prompt in asked]
    used: list[int] = []
    multiply = kind.__call__

    def counted(self: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        used.append(x.numel() // x.shape[-1])
        return multiply(self, x, bias)

    monkeypatch.setattr(kind, "__call__", counted)
    engine = Engine(wide, None, EngineSettings(max_slots=4, max_model_len=300, proposer="prompt_lookup"))
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=10))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert used
    engine.close()
    assert not any(isinstance(module, PackedLinear) for module in wide.model.modules())


def test_other_formats_are_left_alone() -> None:
    model = wrap(tiny_model(264, layers=1, hidden=64).double(), tiny_tokenizer(), "double")
    assert not PackedLinears.helps(model)
