"""Prices of drafts for the rows of a step: as `Others` gives them, asked for again only where rows or costs changed."""

from __future__ import annotations

import pytest

from distillspec.serving.base.rows import Option
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.batch import Habit, Others
from distillspec.serving.selection.prices import Prices

SMALL, LARGE = CostTable.line(0.0, 1e-5, 1e-3), CostTable.line(0.0, 1e-5, 2e-3)
COSTS = LatencyModel(CostTable.line(1e-7, 2e-4, 2e-2), SMALL, members={"a": SMALL, "large": LARGE})
HABITS = {"a": Habit(3.0, 2.2), "large": Habit(4.0, 3.0)}
SURVIVAL = [0.7, 0.5, 0.35]


class Costs:
    """Costs that say how often they were asked for."""

    def __init__(self) -> None:
        self.asked, self.now = 0, COSTS

    def __call__(self) -> LatencyModel:
        self.asked += 1
        return self.now


def expected(others: list[str | None], source: str, costs: LatencyModel = COSTS) -> float:
    return Others.of(others, 400, HABITS).priced(Option(4, source=source), costs, len(SURVIVAL)).goodput(SURVIVAL, None)


def test_a_row_is_priced_by_the_drafts_of_the_others() -> None:
    prices = Prices(Costs(), HABITS)
    prices.see(["a", "a", "large", None], 400)
    assert prices.rows == 4
    for before, others in (("a", ["a", "large", None]), ("large", ["a", "a", None]), (None, ["a", "a", "large"])):
        for source in ("a", "large"):
            found = prices.goodput(before, Option(4, source=source), SURVIVAL, None)
            assert found == pytest.approx(expected(others, source))


def test_rows_that_choose_later_see_what_was_chosen() -> None:
    prices = Prices(Costs(), HABITS)
    prices.see([None, None], 400)
    first = prices.goodput(None, Option(4, source="a"), SURVIVAL, None)
    prices.change(None, "a")
    second = prices.goodput(None, Option(4, source="a"), SURVIVAL, None)
    assert first == pytest.approx(expected([None], "a"))
    assert second == pytest.approx(expected(["a"], "a"))
    assert prices.rows == 2


def test_costs_are_asked_for_again_where_rows_change_or_they_may_have() -> None:
    costs = Costs()
    prices, option = Prices(costs, HABITS), Option(4, source="a")
    for context in (400, 440):
        prices.see(["a", "large"], context)
        prices.goodput("a", option, SURVIVAL, None)
    assert costs.asked == 1
    costs.now = LatencyModel(COSTS.target.scaled(2), SMALL, members=COSTS.members)
    prices.renew()
    assert prices.goodput("a", option, SURVIVAL, None) < expected(["large"], "a")
    prices.see(["a", "a"], 440)
    prices.goodput("a", option, SURVIVAL, None)
    assert costs.asked == 3
