"""Layers in few launches give what the model's own give, on CPUs under Triton's interpreter (see conftest)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.features import FeatureTap, states_of_text
from distillspec.models.fused_layers import FusedLayers
from distillspec.models.paged_cache import PagedCache
from distillspec.models.pages import Pages
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache, masked_attention
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.host_batch import HostBatch
from distillspec.serving.execution.pass_inputs import PassInputs
from distillspec.serving.execution.recorded_shapes import PassShape
from distillspec.serving.execution.row_input import RowInput

from .slot_cases import DEVICE

# Not marked numerics: the interpreter computes with numpy, whatever kernels torch takes.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ),
    reason="needs Triton, and a CUDA device or its interpreter (see tests/conftest.py)",
)
CLOSE = {"atol": 2e-4, "rtol": 2e-4}  # these layers amplify
PLACES = 48
TREE = TokenTree.of_parents([9, 8, 7, 6], [-1, -1, 0, 1])
BEGIN = [RowInput(slot, 0, [3 + slot, 9, 40 + slot], 3) for slot in range(3)]
PASSES = {
    "one token each": [RowInput(slot, 3, [5 + slot]) for slot in range(3)],
    "ragged windows": [RowInput(0, 3, [5], 1), RowInput(1, 3, [6, 7, 8], 3), RowInput(2, 3, [1, 2], 2)],
    "trees": [RowInput(0, 3, [5, 9, 8, 7, 6], 5, TREE), RowInput(1, 3, [6, 9, 8, 7, 6], 5, TREE)],
    "some slots": [RowInput(1, 3, [6, 7], 2), RowInput(2, 3, [1, 2], 2)],
}


@pytest.fixture(scope="module")
def model(random_model: Callable[..., LanguageModel]) -> LanguageModel:
    """A model of its own: its weights become parts of joined ones."""
    shared = random_model("llama")
    return replace(shared, model=deepcopy(shared.model).to(DEVICE))


def cache_of(page: int = 0, state_ids: tuple[int, ...] = ()) -> SlotCache:
    cache = SlotCache(3, PLACES, ragged_attention, state_ids=state_ids)
    if page:
        pages = Pages(3, PLACES, 3 * (PLACES // page + 1), page)
        for slot in range(3):
            pages.resize(slot, PLACES)
        cache = PagedCache.of(cache, pages, torch.device(DEVICE))
        cache.state_ids = state_ids
    return cache


@torch.inference_mode()
def read(model: LanguageModel, fused: FusedLayers | None, cache: SlotCache, *steps: list[RowInput]) -> Tensor:
    found = []
    with slot_attention_in(model.model):
        for rows in steps:
            batch = FlatBatch.of(cache, rows, model.device)
            if fused is None:
                found.append(batch.view.hidden(model, batch.tokens))
            else:
                assert fused.takes(batch.view)
                found.append(fused.hidden(batch.view, batch.tokens))
    return torch.cat(found)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("rows", PASSES.values(), ids=list(PASSES))
def test_passes_give_and_write_what_the_models_own_do(model: LanguageModel, rows: list[RowInput], page: int) -> None:
    own, fused = cache_of(page), cache_of(page)
    goes_on = [RowInput(slot, 8, [11]) for slot in range(3)]
    wanted = read(model, None, own, BEGIN, rows, goes_on)
    torch.testing.assert_close(read(model, FusedLayers(model), fused, BEGIN, rows, goes_on), wanted, **CLOSE)
    for held, other in zip(fused.tensors(), own.tensors(), strict=True):
        real = slice(1, None) if page else (slice(None), slice(None), slice(PLACES))  # page 0 and the spare place
        torch.testing.assert_close(held[real], other[real], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_are_joined_where_they_are(random_model: Callable[..., LanguageModel], dtype: torch.dtype) -> None:
    shared = random_model("llama", dtype)
    own = replace(shared, model=deepcopy(shared.model).to(DEVICE))
    wanted = {name: held.clone() for name, held in own.model.state_dict().items()}
    fused = FusedLayers(own)
    attention = own.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]  # type: ignore[union-attr]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1, "no second copy"
    for name, held in own.model.state_dict().items():
        torch.testing.assert_close(held, wanted[name], atol=0, rtol=0)
    found = read(own, fused, cache_of(), BEGIN).float()
    torch.testing.assert_close(found, read(own, None, cache_of(), BEGIN).float(), atol=0.1, rtol=0.1)
    parts[0].requires_grad_().sum().backward()  # type: ignore[union-attr, operator]  # it can still be trained


def test_states_are_kept_as_a_tap_keeps_them(model: LanguageModel) -> None:
    ids = (0, 2, 4)
    own, fused = cache_of(state_ids=ids), cache_of(state_ids=ids)
    tap = FeatureTap(model, ids)
    read(model, None, own, BEGIN, PASSES["ragged windows"])
    tap.detach()
    read(model, FusedLayers(model), fused, BEGIN, PASSES["ragged windows"])
    for slot, count in enumerate([4, 6, 5]):
        wanted = states_of_text(own, slot, count)
        assert wanted is not None
        torch.testing.assert_close(states_of_text(fused, slot, count), wanted, **CLOSE)


@torch.inference_mode()
def test_a_padded_pass_gives_what_the_tokens_alone_give(model: LanguageModel) -> None:
    """Tokens and rows that only pad write over nothing."""
    rows, fused = PASSES["some slots"], FusedLayers(model)
    own, padded = cache_of(), cache_of()
    wanted = read(model, None, own, BEGIN, rows)[-4:]
    read(model, fused, padded, BEGIN)
    inputs = PassInputs(padded, PassShape(tokens=6, rows=3, width=3, reach=PLACES), model.device)
    inputs.load(HostBatch(padded, rows))
    batch = inputs.batch()
    found = fused.hidden(batch.view, batch.tokens)[:4]
    torch.testing.assert_close(found, wanted, **CLOSE)
    again = [RowInput(slot, 5, [12]) for slot in (1, 2)]
    torch.testing.assert_close(read(model, fused, padded, again), read(model, None, own, again), **CLOSE)


def test_other_models_passes_and_caches_are_left_alone(
    model: LanguageModel, random_model: Callable[..., LanguageModel]
) -> None:
    assert FusedLayers.fit(model)
    assert not any(FusedLayers.fit(random_model(kind)) for kind in ("gpt2", "qwen2", "mistral", "gemma2"))
    assert not FusedLayers.fit(random_model("llama", torch.float64))
    fused, cache = FusedLayers(model), cache_of()
    prompt = [RowInput(0, 0, list(range(3, 40)) * 2)]
    assert not fused.takes(FlatBatch.of(SlotCache(3, 99, ragged_attention), prompt, model.device).view)
    assert not fused.takes(FlatBatch.of(SlotCache(3, 99, masked_attention), BEGIN, model.device).view)
    assert not fused.takes(FlatBatch.of(cache, [BEGIN[0], BEGIN[2]], model.device).view), "two rectangles"
