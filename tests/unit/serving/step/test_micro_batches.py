"""The number of micro-batches that is found, and what a pipeline of them takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.serving.step.micro_batches import AGAIN, FIND, TRIAL, MicroBatches, pipelined_s, split


@pytest.mark.parametrize("count", range(1, 12))
def test_parts_are_neighbours_as_equal_as_can_be(count: int) -> None:
    for size in range(40):
        parts = split(range(size), count)
        assert [item for part in parts for item in part] == list(range(size))
        assert len(parts) == count
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_drafting_hides_behind_verification() -> None:
    assert pipelined_s([3.0], [5.0]) == 8.0
    assert pipelined_s([1.5, 1.5], [2.5, 2.5]) == 1.5 + 5.0
    assert pipelined_s([3.0, 3.0], [1.0, 1.0]) == 7.0  # the target waits for the drafts
    assert pipelined_s([1.0, 0.0, 2.0], [1.0, 1.0, 1.0]) == 4.0


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=9))
def test_a_pipeline_is_never_slower_than_one_after_another_nor_faster_than_either(
    pairs: list[tuple[float, float]],
) -> None:
    drafted, verified = zip(*pairs, strict=True)
    seconds = pipelined_s(drafted, verified)
    assert max(sum(drafted), sum(verified)) - 1e-9 <= seconds <= sum(drafted) + sum(verified) + 1e-9


def test_a_fixed_number_is_bounded_by_the_rows_that_draft() -> None:
    batches = MicroBatches(4)
    assert [batches.count(rows) for rows in (0, 1, 2, 3, 4, 9)] == [1, 1, 2, 3, 4, 4]


def counts_after(rates: dict[int, float], steps: int, rows: int = 8) -> list[int]:
    """Return the numbers chosen over `steps` steps, with so many tokens a second at each."""
    batches, found = MicroBatches(FIND), []
    for _ in range(steps):
        count = batches.count(rows)
        found.append(count)
        batches.observe(rows, 100, 100 / rates.get(count, 1.0))
    return found


@pytest.mark.parametrize(
    ("rates", "best", "tried"),
    [
        ({1: 10.0, 2: 8.0}, 1, {1, 2}),
        ({1: 10.0, 2: 13.0, 3: 14.0, 4: 12.0}, 3, {1, 2, 3, 4}),
        ({1: 10.0, 2: 9.9, 3: 11.0, 4: 9.0}, 3, {1, 2, 3, 4}),  # a little less is no clear drop
        ({1: 10.0, **{count: 10.0 + count for count in range(2, 9)}}, 8, set(range(1, 9))),  # never more than rows
    ],
)
def test_splitting_ends_where_throughput_drops_clearly(rates: dict[int, float], best: int, tried: set[int]) -> None:
    found = counts_after(rates, 9 * (TRIAL + 1) + 20)
    assert found[-1] == best
    assert set(found) == tried
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(found[: found.index(max(found)) + 1]))


def test_steps_of_too_few_rows_say_nothing_of_a_number() -> None:
    """Four rows are never split in seven, so their steps are no trial of that."""
    batches = MicroBatches(FIND)
    while (count := batches.count(7)) < 5:
        batches.observe(7, 100, 1 / count)
    for _ in range(3 * TRIAL):
        batches.observe(4, 100, 1e3)
    assert batches.count(7) == 5


def test_the_number_is_found_again_under_another_load() -> None:
    batches = MicroBatches(FIND)
    chosen = {}
    for step in range(40 * AGAIN):
        rows = 8 if step < 2 * AGAIN else 4
        rates = {1: 1.0, 2: 2.0, 3: 1.0} if step < 2 * AGAIN else {1: 2.0, 2: 1.0}
        count = batches.count(rows)
        batches.observe(rows, 1, 1 / rates.get(count, 0.5))
        chosen[rows] = count
    assert chosen == {8: 2, 4: 1}


def test_where_one_batch_is_best_trials_become_rare() -> None:
    found = counts_after({1: 10.0, 2: 5.0}, 40 * AGAIN)
    assert found[-1] == 1
    assert sum(count > 1 for count in found) < len(found) / 100


def test_one_row_is_never_split() -> None:
    batches = MicroBatches(FIND)
    assert {batches.count(rows) for rows in (0, 1)} == {1}
    batches.observe(1, 5, 1.0)
    assert batches.count(1) == 1
