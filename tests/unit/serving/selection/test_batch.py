"""What one row's draft brings a batch, given those of the other rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distillspec.serving.base.rows import Option
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.batch import RATE, Habit, Others

SMALL, LARGE = CostTable.line(0.0, 1e-5, 1e-3), CostTable.line(0.0, 1e-5, 2e-3)
COSTS = LatencyModel(CostTable.line(1e-7, 2e-4, 2e-2), SMALL, members={"a": SMALL, "b": SMALL, "large": LARGE})
SURVIVAL = [0.7, 0.5, 0.35, 0.25]


def option(source: str, at_once: bool = False) -> Option:
    return Option(4, source=source, at_once=at_once)


def goodput(others: Others, choice: Option, survival: Sequence[float] = SURVIVAL, fixed: int | None = None) -> float:
    """Return the most tokens a second of the batch, if one more row drafts by `choice`."""
    return others.priced(choice, COSTS, len(survival)).goodput(survival, fixed)


def two_tokens_each(source: str, rows: int) -> float:
    """Return the tokens a second of rows of 100 tokens that draft two tokens each."""
    tokens = rows * (1 + SURVIVAL[0] + SURVIVAL[1])
    return tokens / (COSTS.target.seconds(rows * 100, 3 * rows) + 2 * COSTS.members[source].seconds(0, rows))


def test_alone_it_is_the_goodput_of_the_rows_own_chain() -> None:
    for source in ("a", "large"):
        own, costs = goodput(Others.of([], 100, {}), option(source)), COSTS.of_draft(False, source)
        rates = [(1 + sum(SURVIVAL[:length])) / costs.step_s([100], [length]) for length in range(1, 5)]
        assert own == pytest.approx(max(rates), rel=1e-9)
        fixed = goodput(Others.of([], 100, {}), option(source), fixed=2)
        assert fixed == pytest.approx(two_tokens_each(source, 1), rel=1e-9)


def test_a_step_of_rows_that_draft_alike_is_priced_as_such() -> None:
    habits = {"a": Habit(2.0, 1 + 0.7 + 0.5)}
    others = Others.of(["a"] * 3, 400, habits)
    expected = two_tokens_each("a", 4)
    assert goodput(others, option("a"), fixed=2) == pytest.approx(expected, rel=1e-9)


def test_the_draft_that_others_have_is_cheaper_than_its_equal() -> None:
    others = Others.of(["a", "a", "a"], 400, {"a": Habit(3.0, 2.2)})
    with_them, alone = (goodput(others, option(source)) for source in ("a", "b"))
    assert with_them > alone
    assert goodput(others, option("b"), [1.0] * 4) > with_them  # unless the other is so much better


def test_rows_without_a_draft_cost_no_passes() -> None:
    plain, drafting = (Others.of([name] * 3, 400, {"a": Habit(3.0, 1.0)}) for name in (None, "a"))
    assert goodput(plain, option("b")) > goodput(drafting, option("b"))


def test_a_draft_that_seldom_drafts_costs_its_passes_seldom() -> None:
    batches = [Others.of(["large"], 200, {"large": Habit(drafted, 1.5)}) for drafted in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)]
    rates = [goodput(others, option("a")) for others in batches]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] / rates[1] < 1.02


def test_a_block_is_one_pass() -> None:
    found = goodput(Others.of([], 100, {}), option("a", at_once=True))
    assert found > goodput(Others.of([], 100, {}), option("a"))


def test_blocks_of_other_rows_cost_one_pass() -> None:
    habits = {"a": Habit(3.0, 2.0)}
    loop, block = (
        goodput(Others.of(["a"] * 2, 100, habits, blocks), option("large"))
        for blocks in (frozenset[str](), frozenset({"a"}))
    )
    assert block > loop


def test_habits_are_running_averages() -> None:
    habit = Habit()
    for _ in range(400):
        habit = habit.after(4, 3)
    assert habit == pytest.approx((4.0, 3.0), abs=1e-6)
    assert Habit(2.0, 1.0).after(4, 2) == pytest.approx((2 + 2 * RATE, 1 + RATE))
