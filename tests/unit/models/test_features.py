"""Kept features are transformers' hidden states of every token, whatever passes the tokens came in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.features import FeatureTap, check_feature_ids, default_state_ids, feature_bytes_per_token
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.row_input import RowInput

FAMILIES = ["llama", "gemma3_text", "qwen3", "mistral"]


def own_states(model: LanguageModel, ids: list[int], tokens: list[int]) -> torch.Tensor:
    """Return transformers' hidden states after so many layers, the last one before the final norm, `[n, F]`."""
    normed: list[torch.Tensor] = []
    handle = model.layers[-1].register_forward_hook(
        lambda layer, inputs, output: normed.append(output[0] if isinstance(output, tuple) else output)
    )
    states = model.decoder(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    return torch.cat([(normed[0] if state == len(model.layers) else states[state])[0] for state in ids], -1)


def hooks(model: LanguageModel) -> int:
    """Count the hooks of torch on the layers."""
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.layers)


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(1, (0,)), (2, (1,)), (3, (1, 2)), (4, (2, 3)), (5, (2, 4)), (6, (2, 3, 5)), (7, (2, 3, 6))],
)
def test_a_target_of_few_layers_has_each_default_state_once(layers: int, ids: tuple[int, ...]) -> None:
    model = wrap(tiny_model(64, layers=layers), None, "tiny")
    assert default_state_ids(model) == ids
    check_feature_ids(model, ids)


@pytest.mark.numerics
@pytest.mark.parametrize("kind", FAMILIES)
@torch.inference_mode()
def test_they_are_the_models_own_hidden_states(random_model: Callable[..., LanguageModel], kind: str) -> None:
    model = random_model(kind, torch.float64)
    ids = [4, 0, 2]
    texts = [[(7 * i + r) % 200 + 3 for i in range(30)] for r in range(2)]
    cache = SlotCache(2, 40)
    before = hooks(model)
    cache.state_ids = tuple(ids)
    tap = FeatureTap(model, ids)
    with slot_attention_in(model.model):
        for pieces in ([(0, 0, 13), (1, 0, 29)], [(0, 13, 30), (1, 29, 30)]):  # a prompt in chunks, then windows
            rows = [RowInput(slot, start, texts[slot][start:end]) for slot, start, end in pieces]
            batch = FlatBatch.of(cache, rows, model.device)
            model.hidden(batch.tokens, batch.view.positions, slot_view=batch.view)
        elsewhere = FlatBatch.of(SlotCache(2, 40), [RowInput(0, 0, [9, 9, 9])], model.device)
        model.hidden(elsewhere.tokens, elsewhere.view.positions, slot_view=elsewhere.view)
    assert hooks(model) == before + len(ids)
    tap.detach()
    assert hooks(model) == before
    assert cache.features is not None
    for slot, text in enumerate(texts):
        torch.testing.assert_close(cache.features[slot, 0, :30], own_states(model, ids, text), atol=1e-10, rtol=1e-10)


def test_they_follow_their_slot() -> None:
    cache = SlotCache(2, 8, features=torch.arange(2 * 9 * 3.0).view(2, 1, 9, 3))
    assert cache.features is not None
    first = cache.features.clone()
    cache.copy(0, 1, 4)
    assert torch.equal(cache.features[1, 0, :4], first[0, 0, :4])
    cache.gather(torch.tensor([[1, 1], [2, 5], [1, 2]]))
    assert torch.equal(cache.features[1, 0, 1:3], torch.stack([first[0, 0, 2], first[1, 0, 5]]))
    cache.clear(1, 2)
    assert not cache.features[1, 0, 2:].any()
    cache.release()
    assert cache.features is None


def test_wrong_states_are_refused_and_memory_is_stated(random_model: Callable[..., LanguageModel]) -> None:
    model = random_model("llama")
    with pytest.raises(ConfigError, match=r"feature_ids=\[2, 5\]: llama has states 0 to 4, not 5"):
        check_feature_ids(model, [2, 5])
    with pytest.raises(ConfigError, match="names a state twice"):
        check_feature_ids(model, [2, 2])
    assert feature_bytes_per_token(model, [0, 3]) == 2 * model.head.weight.shape[1] * 4
