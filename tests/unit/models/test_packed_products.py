"""Packed products are the plain ones, for any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.models.packed_products import KINDS, HalfProduct, PackedProduct
from distillspec.models.product_trial import keeps_rows_apart

pytestmark = pytest.mark.numerics

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


def weight(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of 16 bits, as checkpoints have them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(dtype)


def packed(kind: type[PackedProduct], like: Tensor) -> PackedProduct:
    try:
        return kind(like)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 40, 100])
def test_products_are_the_plain_ones(kind: type[PackedProduct], dtype: torch.dtype, rows: int) -> None:
    of, bias = weight(dtype, 336, 256), weight(dtype, 336)  # an odd number of blocks
    product = packed(kind, of)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(dtype)
    wanted = x.double() @ of.double().T + bias.double()
    found = product(x, bias)
    assert found.dtype == dtype
    scale = x.double().abs() @ of.double().abs().T + bias.double().abs()
    assert ((found.double() - wanted).abs() <= 4 * torch.finfo(dtype).eps * scale).all()
    assert product(x[None]).shape == (1, rows, 336)
    if keeps_rows_apart(product, of):  # others are not used
        assert torch.equal(product(x)[:1], product(x[:1]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_compilers_find_the_same_product(kind: type[PackedProduct]) -> None:
    product = packed(kind, weight(torch.float32, 320, 256))
    compiled = torch.compile(product.__call__, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 7):
        x, bias = weight(torch.float32, 1, rows, 256), weight(torch.float32, 320)
        assert torch.equal(compiled(x, bias), product(x, bias))


@pytest.mark.parametrize("size", [1e-9, 0.02, 1e6])
def test_half_products_scale_what_float16_does_not_reach(size: float) -> None:
    of = (weight(torch.float32, 320, 256) * size).to(torch.bfloat16).float()
    assert HalfProduct.fits(of, exact=True)
    x = weight(torch.float32, 5, 256)
    wanted, scale = x.double() @ of.double().T, x.double().abs() @ of.double().abs().T
    found = packed(HalfProduct, of)(x).double()
    assert ((found - wanted).abs() <= 4 * torch.finfo(torch.float32).eps * scale).all()


@pytest.mark.parametrize(
    ("value", "exact", "rounded"),
    [
        pytest.param(2.0**-24, True, True, id="the smallest"),
        pytest.param(1 / 3, False, True, id="24 bits"),
        pytest.param(2.0**20, True, True, id="large"),
        pytest.param(float("inf"), False, False, id="infinite"),
        pytest.param(float("nan"), False, False, id="NaN"),
    ],
)
def test_half_products_take_weights_that_they_hold(value: float, exact: bool, rounded: bool) -> None:
    of = torch.ones(3, 4)
    of[1, 2] = value
    assert HalfProduct.fits(of, exact=True) == exact
    assert HalfProduct.fits(of, exact=False) == rounded
    assert HalfProduct.size(of) == 24


def test_errors_below_the_rounding_of_the_largest_weight_are_allowed() -> None:
    of = torch.ones(2, 4)
    of[0] = torch.tensor([1.0, 1e-9, 0.5, 2.0])
    assert HalfProduct.fits(of, exact=True)
    of[0] = torch.tensor([1.0, 1 / 3, 0.5, 2.0])
    assert not HalfProduct.fits(of, exact=True)
