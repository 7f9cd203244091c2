"""The Triton kernel, on CPUs under its interpreter (see conftest), gives what masked attention gives."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from distillspec.models.ragged_attention import MOST_QUERIES, ragged_attention, split_parts
from distillspec.models.slot_cache import masked_attention

from .slot_cases import DEVICE, both, cache_view, tree_view

# Not marked numerics: the interpreter computes with numpy, whatever kernels torch takes.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ),
    reason="needs Triton, and a CUDA device or its interpreter (see tests/conftest.py)",
)
# Sums run in another order, and on CUDA exponentials are approximations.
CLOSE = {"atol": 2e-6 if DEVICE == "cpu" else 2e-5, "rtol": 1e-5}


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 40), (2, 2, 80)])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 2, 5]])
def test_rows_of_unlike_lengths(heads: int, kv_heads: int, dim: int, counts: list[int]) -> None:
    view = cache_view([0, 300, 63], counts, [0, 1, 2])
    found, wanted = both(ragged_attention, view, heads, kv_heads, dim)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_slots_in_any_order() -> None:
    found, wanted = both(ragged_attention, cache_view([200, 7], [2, 2], [3, 1]), 4, 2, 32)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("how", [{"window": 5}, {"window": 130}, {"softcap": 2.0}, {"scaling": 0.5}])
def test_what_the_model_asks_for(how: dict[str, float]) -> None:
    view = cache_view([0, 300, 63], [3, 3, 2], [0, 1, 2])
    found, wanted = both(ragged_attention, view, 4, 2, 32, **how)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("how", [{}, {"window": 4}, {"window": 130}, {"softcap": 2.0}])
@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0, 300, 63], [6, 6, 6]), ([120, 5, 62], [5, 9, 1]), ([60, 250, 31], [64, 64, 40]), ([1, 190, 128], [66, 50, 9])],
)
def test_trees_beside_chains(starts: list[int], counts: list[int], how: dict[str, float]) -> None:
    """Nodes on both sides of a step of keys, of a part, and of a word of ancestors."""
    view = tree_view(cache_view(starts, counts, [2, 0, 1]), seed=sum(starts), chains=1)
    found, wanted = both(ragged_attention, view, 2, 2, 32, **how)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_wide_trees_with_grouped_queries() -> None:
    view = tree_view(cache_view([10, 380], [14, 14], [0, 1]), seed=7)
    found, wanted = both(ragged_attention, view, 9, 3, 64)
    torch.testing.assert_close(found, wanted, **CLOSE)
    chains, _ = both(ragged_attention, cache_view([10, 380], [14, 14], [0, 1]), 9, 3, 64)
    assert not torch.allclose(found, chains, atol=1e-2)


def test_trees_are_not_left_to_masks() -> None:
    def never(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a tree that fits the kernel")

    view = tree_view(cache_view([10], [MOST_QUERIES], [0]), seed=1)
    keys, values = torch.randn(2, 1, 1, 401, 16, device=DEVICE)
    query = torch.randn(1, 1, MOST_QUERIES, 16, device=DEVICE)
    found = ragged_attention(query, keys, values, view, otherwise=never)
    torch.testing.assert_close(found, masked_attention(query, keys, values, view), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_formats(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter takes bfloat16 products for products of integers")
    found, wanted = both(ragged_attention, cache_view([250, 30], [4, 4], [0, 1]), 8, 2, 64, dtype)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


def test_keys_past_a_rows_own_are_never_read() -> None:
    """Keys that masked attention multiplies by zero may be anything here, NaN too."""
    view = cache_view([40, 300], [1, 1], [0, 1])
    keys, values = torch.randn(2, 2, 2, 401, 32, device=DEVICE)
    query = torch.randn(2, 4, 1, 32, device=DEVICE)
    clean = ragged_attention(query, keys, values, view)
    keys[0, :, 41:], values[0, :, 41:] = torch.nan, torch.nan
    assert torch.equal(ragged_attention(query, keys, values, view), clean)


def test_padding_gives_zeros() -> None:
    view = cache_view([40, 300], [3, 1], [0, 1])
    keys, values = torch.randn(2, 2, 2, 401, 32, device=DEVICE)
    out = ragged_attention(torch.randn(2, 4, 3, 32, device=DEVICE), keys, values, view)
    assert out[1, 1:].abs().max() == 0


@pytest.mark.parametrize(("reach", "programs"), [(1, 1), (64, 300), (4096, 1), (4096, 64), (100, 2)])
def test_parts_cover_all_keys(reach: int, programs: int) -> None:
    length, parts = split_parts(reach, programs)
    assert (parts - 1) * length < reach <= parts * length
