"""torch's variable-length attention over the slots gives what masked attention gives.

FlashAttention runs on CUDA alone. Elsewhere a slow and literal version of torch's documentation answers its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distillspec.models import varlen_attention as module
from distillspec.models.slot_cache import SlotCache, SlotView
from distillspec.models.varlen_attention import varlen_attention

from .slot_cases import DEVICE, both, cache_view, varlen_described

pytestmark = pytest.mark.numerics
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = {"atol": 1e-2, "rtol": 1e-2} if DEVICE == "cuda" else {"atol": 2e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sequences (one for each key head of a row), and queries a sequence, of each call to torch."""
    calls: list[tuple[int, int]] = []
    answer: Callable[..., Any] = module.varlen.varlen_attn if DEVICE == "cuda" else varlen_described

    def watched(*args: Any, **how: Any) -> Any:
        calls.append((len(args[3]) - 1, args[5]))
        return answer(*args, **how)

    monkeypatch.setattr(module.varlen, "varlen_attn", watched)
    return calls


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 40)])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 2, 5], [90, 3, 1], [2, 0, 2]])
def test_rows_of_unlike_lengths(
    heads: int, kv_heads: int, dim: int, counts: list[int], calls: list[tuple[int, int]]
) -> None:
    view = cache_view([0, 200, 63], counts, [0, 1, 2])
    found, wanted = both(varlen_attention, view, heads, kv_heads, dim, DTYPE)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert calls == [(3 * kv_heads, max(counts))]


def test_neighbours_anywhere_in_the_cache(calls: list[tuple[int, int]]) -> None:
    found, wanted = both(varlen_attention, cache_view([200, 7], [2, 2], [2, 3]), 4, 2, 32, DTYPE)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert calls == [(4, 2)]


@pytest.mark.parametrize("how", [{"window": 5}, {"window": 130}, {"scaling": 0.5}])
def test_what_the_model_asks_for(how: dict[str, float]) -> None:
    view = cache_view([0, 300, 63], [3, 3, 2], [0, 1, 2])
    found, wanted = both(varlen_attention, view, 4, 2, 32, DTYPE, **how)
    torch.testing.assert_close(found, wanted, **CLOSE)


def tree() -> SlotView:
    places = torch.tensor([[40, 41, 42]], device=DEVICE)
    ancestors = torch.tensor([[[0b001], [0b011], [0b101]]], device=DEVICE)
    positions = torch.tensor([[40, 41, 41]], device=DEVICE)
    row = torch.zeros(1, dtype=torch.long, device=DEVICE)
    return SlotView(SlotCache(1, 400), places, positions, 64, row, 0, torch.tensor([40], device=DEVICE), ancestors)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(cache_view([200, 7], [2, 2], [3, 1]), id="slots in any order"),
        pytest.param(cache_view([396, 200], [1, 8], [0, 1]), id="padding past the slot's end"),
        pytest.param(tree(), id="a tree"),
    ],
)
def test_the_rest_is_left_to_masks(view: SlotView, calls: list[tuple[int, int]]) -> None:
    found, wanted = both(varlen_attention, view, 4, 2, 32, DTYPE)
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert calls == []


def test_soft_caps_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="no soft cap"):
        both(varlen_attention, cache_view([3], [1], [0]), 4, 2, 32, DTYPE, softcap=2.0)
