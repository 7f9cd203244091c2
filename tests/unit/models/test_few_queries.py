"""The C++ kernel for few queries gives what masked attention gives, and looks at nothing that it should not see."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import pytest
import torch

from distillspec.models import few_queries as module
from distillspec.models.few_queries import few_queries_attention, why_not
from distillspec.models.slot_cache import Attend, SlotView
from distillspec.native.library import FLAGS, cpp_compiler

from .slot_cases import both, cache_view, tree_view

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]
CLOSE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 2e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-2, "rtol": 1.6e-2},
}
WIDEST = module.MOST_QUERIES[16]


@pytest.fixture(autouse=True)
def left_to_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens a row of each call that the kernel leaves to masked attention. All lanes take the widest rows."""
    calls: list[int] = []
    masked: Attend = module.masked_attention

    def watched(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return masked(query, *rest)

    monkeypatch.setattr(module, "masked_attention", watched)
    monkeypatch.setattr(module, "MOST_QUERIES", {8: WIDEST, 16: WIDEST})
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (4, 1, 256), (8, 2, 112), (6, 2, 96)])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 2, 5], [16, 3, 1], [2, 0, 2]])
def test_rows_of_unlike_lengths(
    heads: int,
    kv_heads: int,
    dim: int,
    counts: list[int],
    threads: int,
    dtype: torch.dtype,
    left_to_masks: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    view = cache_view([0, 200, 63], counts, [2, 0, 1])
    found, wanted = both(few_queries_attention, view, heads, kv_heads, dim, dtype)
    torch.testing.assert_close(found, wanted, **CLOSE[dtype])
    assert not left_to_masks


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake", "sapphirerapids"])
def test_every_processor_gets_a_kernel(processor: str) -> None:
    compiler, flags = cpp_compiler(), [flag for flag in FLAGS if not flag.startswith("-march")]
    assert compiler is not None
    command = [compiler, *flags, f"-march={processor}", "-fsyntax-only", str(module.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", [{"window": 17}, {"window": 130}, {"scaling": 0.5}, {"window": 64, "scaling": 0.01}])
@pytest.mark.parametrize("wide", [False, True], ids=["chains", "trees"])
def test_what_the_model_asks_for(how: dict[str, float], wide: bool, left_to_masks: list[int]) -> None:
    view = cache_view([0, 300, 63], [16, 16, 16] if wide else [16, 3, 9], [0, 1, 2])
    found, wanted = both(few_queries_attention, tree_view(view, 1) if wide else view, 4, 2, 32, **how)
    torch.testing.assert_close(found, wanted, **CLOSE[torch.float32])
    assert not left_to_masks


@pytest.mark.parametrize("seed", range(5))
def test_trees_and_chains_beside_them(seed: int, left_to_masks: list[int]) -> None:
    view = tree_view(cache_view([0, 200, 63], [11, 11, 11], [0, 1, 2]), seed, chains=1)
    found, wanted = both(few_queries_attention, view, 9, 3, 64)
    torch.testing.assert_close(found, wanted, **CLOSE[torch.float32])
    assert not left_to_masks


@pytest.mark.parametrize(
    ("counts", "dim", "how"),
    [
        pytest.param([17, 1], 64, {}, id="a prompt"),
        pytest.param([2, 2], 36, {}, id="heads that fill no vector"),
        pytest.param([9, 9], 64, {"window": 9}, id="a window that ends among the new tokens"),
        pytest.param([2, 2], 64, {"softcap": 20.0}, id="a soft cap"),
    ],
)
def test_the_rest_is_left_to_masks(
    counts: list[int], dim: int, how: dict[str, float], left_to_masks: list[int]
) -> None:
    found, wanted = both(few_queries_attention, cache_view([100, 3], counts, [0, 1]), 4, 2, dim, **how)
    assert torch.equal(found, wanted)
    assert left_to_masks == [max(counts)]


def held(view: SlotView, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, width = view.places.shape
    query = torch.randn(batch, 4, width, 32, generator=generator)
    keys, values = (torch.randn(view.cache.slots, 2, view.cache.max_len + 1, 32, generator=generator) for _ in "kv")
    return query, keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    view = cache_view([0, 300, 63], [4, 4, 4], [0, 1, 2])
    query, keys, values = (given.to(dtype) for given in held(view))
    together = few_queries_attention(query, keys, values, view)
    for row in range(3):
        alone = cache_view([[0, 300, 63][row]], [4], [row])
        assert torch.equal(few_queries_attention(query[row : row + 1], keys, values, alone)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row_and_what_lies_behind_a_text_is_never_read(dtype: torch.dtype) -> None:
    view = cache_view([10, 20], [3, 2], [0, 1])
    query, keys, values = (given.to(dtype) for given in held(view))
    wanted = few_queries_attention(query, keys, values, view)
    keys[0, :, 13:], values[0, :, 13:], values[1, :, 22:] = torch.nan, torch.nan, torch.nan
    assert torch.equal(few_queries_attention(query, keys, values, view)[0], wanted[0])
    keys[1, 0, 5] = torch.nan
    found = few_queries_attention(query, keys, values, view)
    assert torch.equal(found[0], wanted[0])
    assert found[1, :2, :2].isnan().all()
    assert torch.equal(found[1, :2, 2:], wanted[1, :2, 2:]), "the other key head"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edge", [16, 64, 128])
def test_texts_that_end_at_the_edges_of_blocks(edge: int, dtype: torch.dtype) -> None:
    view = cache_view([edge - 2, edge - 1, edge], [16, 1, 5], [0, 1, 2])
    found, wanted = both(few_queries_attention, view, 9, 3, 64, dtype)
    torch.testing.assert_close(found, wanted, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"window": 17}, {"window": 130}])
def test_tokens_read_together_are_those_read_apart(how: dict[str, int], dtype: torch.dtype) -> None:
    query, keys, values = (given.to(dtype) for given in held(cache_view([300], [4], [0])))
    together = few_queries_attention(query, keys, values, cache_view([300], [4], [0]), **how)
    for token in range(4):
        alone = few_queries_attention(
            query[:, :, token : token + 1], keys, values, cache_view([300 + token], [1], [0]), **how
        )
        assert torch.equal(alone[:, 0], together[:, token])


def test_padding_is_finite() -> None:
    view = cache_view([10, 20, 30], [3, 0, 1], [0, 1, 2])
    query, keys, values = held(view)
    query.transpose(1, 2)[view.places == view.cache.max_len] = torch.nan
    assert few_queries_attention(query, keys, values, view).isfinite().all()


@pytest.mark.parametrize("size", [1e4, 1e-30])
def test_scores_of_any_size(size: float) -> None:
    view = cache_view([100], [3], [0])
    query, keys, values = held(view)
    found = few_queries_attention(query * size, keys, values, view)
    wanted = module.masked_attention(query.double() * size, keys.double(), values.double(), view)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
