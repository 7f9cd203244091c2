"""Shapes of recorded passes: which one a pass runs as, and that all of ordinary decoding are recorded ahead."""

from __future__ import annotations

from itertools import product

import pytest

from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.execution.host_batch import HostBatch
from distillspec.serving.execution.recorded_shapes import PassShape, RecordedShapes
from distillspec.serving.execution.row_input import RowInput

EVERYTHING = 10_000


def shape_of(
    shapes: RecordedShapes, cache: SlotCache, counts: list[int], first: int = 0, reach: int = 9
) -> PassShape | None:
    rows = [RowInput(first + slot, 0, [7] * count) for slot, count in enumerate(counts)]
    return shapes.shape(HostBatch(cache, rows), reach)


def test_linear_layers_get_small_steps_and_attention_a_rectangle() -> None:
    cache = SlotCache(16, 4096)
    shapes = RecordedShapes.of_target(cache, 4)
    assert shape_of(shapes, cache, [5] + 7 * [1]) == PassShape(12, 8, 5, 256), "eight rows, one window of five"
    assert shape_of(shapes, cache, [5] * 11) == PassShape(56, 16, 5, 256)
    assert shape_of(shapes, cache, [1] * 3) == PassShape(3, 4, 1, 256)
    assert shape_of(shapes, cache, [1], first=9) == PassShape(1, 16, 1, 256), "rows are slots"
    assert shape_of(shapes, cache, [2, 3], reach=300) == PassShape(5, 2, 5, 512)


def test_prompts_and_trees_are_not_recorded() -> None:
    cache = SlotCache(4, 256)
    shapes = RecordedShapes.of_target(cache, 3)
    assert shape_of(shapes, cache, [1, 5]) is None
    tree = TokenTree.of_parents([7, 7], [-1, -1])
    batch = HostBatch(cache, [RowInput(0, 5, [7, 7, 7], 3, tree)])
    assert shapes.shape(batch, 9) is None


@pytest.mark.parametrize(("slots", "length"), [(1, 4), (3, 3), (6, 0), (5, 2)])
def test_whatever_neighbouring_rows_draft_is_recorded_ahead(slots: int, length: int) -> None:
    cache = SlotCache(slots, 256)
    shapes = RecordedShapes.of_target(cache, length)
    ahead = shapes.ahead(EVERYTHING)
    assert len(ahead) == len(set(ahead))
    for rows in range(1, slots + 1):
        for counts in product(range(1, length + 2), repeat=rows):
            assert shape_of(shapes, cache, list(counts)) in ahead


def test_the_largest_come_first_and_a_bound_leaves_out_long_contexts_then_windows() -> None:
    cache = SlotCache(16, 4096, attend=ragged_attention)
    shapes = RecordedShapes.of_target(cache, 4)
    ahead = shapes.ahead(EVERYTHING)
    assert {shape.reach for shape in ahead} == {1024, 4096}, "rows read their own keys, however many"
    assert len(ahead) < 128
    short = [shape for shape in ahead if shape.reach == 1024]
    tokens = [shape.tokens for shape in short]
    assert tokens == sorted(tokens, reverse=True)
    single = [shape for shape in short if shape.width == 1]
    assert set(shapes.ahead(len(single))) == set(single)
    assert set(shapes.ahead(len(short))) == set(short)


def test_passes_of_a_draft_compute_as_many_tokens_as_there_are_rows() -> None:
    cache = SlotCache(11, 256)
    shapes = RecordedShapes.of_draft(cache)
    assert shape_of(shapes, cache, [1] * 9) == PassShape(10, 10, 1, 256)
    assert shape_of(shapes, cache, [1] * 11) == PassShape(11, 11, 1, 256)
    assert shape_of(shapes, cache, [2, 1, 1]) == PassShape(6, 3, 2, 256)
    assert shape_of(shapes, cache, [17]) is None
    assert shapes.ahead(EVERYTHING) == []
