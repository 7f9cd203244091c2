"""Weights of a layer for the C++ kernel: scaled where float16 needs it, null where a layer lacks them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distillspec.models.few_queries import why_not
from distillspec.models.large_pages import LargePages
from distillspec.models.packed_layer import PackedLayer
from distillspec.native.vector_kernel import Kind

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}")
HALVES = Kind(torch.float32, torch.float16)


def test_what_a_layer_lacks_is_null() -> None:
    norm = nn.RMSNorm(32)
    packed = PackedLayer.of(
        (None, None, torch.ones(32, 64), torch.ones(32, 32)), (norm, None, None), HALVES, LargePages()
    )
    null = [pointer == 0 for pointer in packed.pointers]
    assert null == [True, True, False, False, False, True, True, False]


def test_small_weights_are_scaled_and_their_sums_scaled_back() -> None:
    small = torch.full((32, 32), 2.0**-30)
    packed = PackedLayer.of((None, None, None, small), (None,) * 3, HALVES, LargePages())
    held = packed.weights[3]
    assert held is not None
    assert packed.scales[:3].tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(held.float() * packed.scales[3], torch.full_like(held, 2.0**-30, dtype=torch.float32))
