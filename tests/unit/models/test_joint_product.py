"""Layers of one input multiply together: what each would give alone, in fewer products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distillspec.models import LanguageModel
from distillspec.models.joint_product import JointLinear, JointProduct, layers_by_input
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.numerics


class PlainProduct:
    """A packed product that is none, and counts its calls."""

    name = "plain"
    calls = 0

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        PlainProduct.calls += 1
        return nn.functional.linear(x, self.weight, bias)

    @staticmethod
    def size(weight: Tensor) -> int:
        return weight.numel()

    @staticmethod
    def fits(weight: Tensor, *, exact: bool) -> bool:
        return True


def layers(bias: bool) -> list[nn.Linear]:
    made = [nn.Linear(16, out, bias=bias, dtype=torch.float64) for out in (24, 8, 8)]
    return [layer.requires_grad_(False) for layer in made]


def joint_of(made: list[nn.Linear]) -> JointProduct:
    PlainProduct.calls = 0
    return JointProduct(made, PlainProduct)


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_every_layers_output(bias: bool) -> None:
    made = layers(bias)
    joint, x = joint_of(made), torch.randn(1, 5, 16, dtype=torch.float64)
    found = [joint.output(place, x) for place in range(3)]
    assert PlainProduct.calls == 1
    for layer, output in zip(made, found, strict=True):
        torch.testing.assert_close(output, layer(x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
def test_any_order_of_calls_and_other_inputs_are_right(order: tuple[int, ...]) -> None:
    """Inputs of one shape that follow one another in the same memory are told apart."""
    made = layers(bias=True)
    joint = joint_of(made)
    for place in order:
        for x in (torch.randn(2, 16, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)):
            torch.testing.assert_close(joint.output(place, x), made[place](x))


def test_a_second_pass_over_the_same_tensor_is_computed_anew() -> None:
    """A buffer that is filled again is the same tensor with other numbers."""
    made = layers(bias=False)
    joint, buffer = joint_of(made), torch.randn(2, 16, dtype=torch.float64)
    for _ in range(2):
        found = [joint.output(place, buffer) for place in range(3)]
        for layer, output in zip(made, found, strict=True):
            torch.testing.assert_close(output, layer(buffer))
        buffer.normal_()
    assert PlainProduct.calls == 2


def test_the_layer_keeps_its_weight_and_bias() -> None:
    made = layers(bias=True)
    joint, x = joint_of(made), torch.randn(2, 16, dtype=torch.float64)
    wanted = made[1](x)
    made[1].__class__ = JointLinear
    made[1].__dict__.update(joint=joint, index=1)
    torch.testing.assert_close(made[1](x), wanted)
    assert set(made[1].state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral"])
def test_layers_of_one_input_are_found(random_model: Callable[[str], LanguageModel], kind: str) -> None:
    model = random_model(kind)
    found = list(layers_by_input(model.decoder))
    assert sorted(map(len, found)) == sorted([3, 2, 1, 1] * len(model.layers))
    linear = [module for module in model.decoder.modules() if type(module) is nn.Linear]
    assert sorted(id(layer) for group in found for layer in group) == sorted(map(id, linear))


def test_tied_and_unlike_layers_stay_alone() -> None:
    first = wrap(tiny_model(264, layers=1, hidden=64), tiny_tokenizer(), "tied").layers[0]
    first.mlp.up_proj.weight = first.mlp.gate_proj.weight
    first.self_attn.q_proj.bias = nn.Parameter(torch.zeros(first.self_attn.q_proj.out_features))
    assert {len(group) for group in layers_by_input(first)} == {1}
