"""Packed weights are used where they fit, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel, packed_linear, product_trial
from distillspec.models.joint_product import JointLinear, layers_by_input
from distillspec.models.packed_linear import PackedLinear, PackedLinears
from distillspec.models.packed_products import KINDS, HalfProduct, OneDnnProduct, PackedProduct
from distillspec.models.packing import FEW, FEW_TOKENS, MANY_TOKENS, ByTokens, Packing
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


def only(kind: type[PackedProduct]) -> Packing:
    return Packing(kind, kind)


@needs_onednn
def test_an_exact_model_whose_weights_need_more_than_16_bits_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: (HalfProduct, OneDnnProduct))
    model = wide_model(torch.float32)
    assert PackedLinears(model).packing == only(HalfProduct)
    model.layers[0].mlp.gate_proj.weight[3, 5] = 1 / 3
    assert PackedLinears(model).packing == only(OneDnnProduct)
    assert PackedLinears(model, exact=False).packing == only(HalfProduct), "drafts may be rounded"
    model.layers[0].mlp.gate_proj.weight[3, 5] = torch.inf
    assert PackedLinears(model, exact=False).packing == only(OneDnnProduct)


@needs_onednn
def test_a_copy_that_does_not_fit_into_memory_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model(torch.float32)
    groups = [sum(layer.weight.numel() for layer in layers) for layers in layers_by_input(model.decoder)]
    elements = sum(size for size in [*groups, model.head.weight.numel()] if size >= packed_linear.SMALLEST)
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: (OneDnnProduct, HalfProduct))
    for free, wanted in ((8 * elements, OneDnnProduct), (8 * elements - 1, HalfProduct), (4 * elements - 1, None)):
        monkeypatch.setattr(packed_linear, "free_bytes", lambda device, free=free: free)
        assert PackedLinears(model).packing == (None if wanted is None else only(wanted))


@needs_onednn
def test_two_copies_are_made_where_one_is_faster_for_few_tokens_and_memory_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wide_model(torch.float32)
    single = PackedLinears(model, tokens=(32,))
    assert single.packing is None or single.packing.few is single.packing.many
    by_tokens = {FEW_TOKENS: (HalfProduct, OneDnnProduct), MANY_TOKENS: (OneDnnProduct, HalfProduct)}
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: by_tokens.get(tokens, (OneDnnProduct,)))
    both = PackedLinears(model).packing
    assert both == Packing(HalfProduct, OneDnnProduct)
    assert both.name == "FBGEMM in float16 for up to 8 tokens and by oneDNN for more"
    size = sum(both.size(layer.weight) for layers in layers_by_input(model.decoder) for layer in layers)
    monkeypatch.setattr(packed_linear, "free_bytes", lambda device: 1.9 * size)  # half of it may be taken
    assert PackedLinears(model).packing == only(OneDnnProduct)
    model.layers[0].mlp.gate_proj.weight[3, 5] = 1 / 3  # float16 rounds it
    monkeypatch.setattr(packed_linear, "free_bytes", lambda device: None)
    assert PackedLinears(model).packing == only(OneDnnProduct)


@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1, 40])
def test_passes_take_the_copy_for_their_number_of_tokens(tokens: int) -> None:
    used: list[str] = []

    def product(name: str) -> Any:
        return lambda x, bias: used.append(name) or x

    x = torch.ones(1, tokens, 4)
    assert ByTokens(product("few"), product("many"), 4)(x) is x
    assert used == ["few" if tokens <= FEW else "many"]


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
    alone = [one.gate_proj, one.down_proj, model.layers[0].self_attn.o_proj]
    assert len(own) == len(alone)
    assert one.up_proj.packed is one.gate_proj.packed
    joint = {id(layer.joint) for layer in layers if isinstance(layer, JointLinear)}
    assert len(joint) == 1, "queries, keys and values"
    packs.detach()
    assert {type(layer) for layer in layers} == {torch.nn.Linear}


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
    assert not any(isinstance(module, PackedLinear | JointLinear) for module in wide.model.modules())


def test_other_formats_are_left_alone() -> None:
    model = wrap(tiny_model(264, layers=1, hidden=64).double(), tiny_tokenizer(), "double")
    assert not PackedLinears.helps(model)
