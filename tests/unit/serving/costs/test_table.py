"""Cost tables: interpolation, lines beyond the knots, rising costs, and impossible tables refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy
import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.ladder import Ladder
from distillspec.serving.costs.table import KNOTS, CostTable

TABLE = CostTable(((1.0, 1.0), (5.0, 1.2), (9.0, 2.0)), 0.01, 0.1)


def test_seconds_are_interpolated_and_go_on_beyond_the_knots() -> None:
    assert [TABLE.seconds(0, n) for n in (0, 1, 3, 5, 7, 9, 19)] == pytest.approx([1, 1, 1.1, 1.2, 1.6, 2, 4])
    assert TABLE.seconds(50, 5, 3) == pytest.approx(1.2 + 0.5 + 0.3)
    tokens = numpy.array([[0.0, 1, 3], [7, 9, 19]])
    assert TABLE.by_tokens(tokens).ravel().tolist() == pytest.approx([TABLE.seconds(0, n) for n in tokens.ravel()])


def test_a_line_is_one_everywhere() -> None:
    line = CostTable.line(0.5, 2.0, 10.0)
    assert [line.seconds(4, n) for n in (0, 1, 300)] == pytest.approx([12, 14, 612])


def test_times_that_fall_are_lifted() -> None:
    """Measured on a server with AVX512-BF16: a pass over two tokens took 0.77 of one over one."""
    assert CostTable.rising([(1, 1.0), (2, 0.77), (3, 1.2)]).knots == ((1, 1.0), (2, 1.0), (3, 1.2))


def test_a_recorded_pass_costs_what_the_number_costs_that_it_runs_as() -> None:
    """In a table recorded up to 8 tokens: 6 and 7 run as 8, beyond it nothing is padded."""
    table = replace(TABLE, recorded=Ladder((1, 5, 8)))
    as_run = [(0, 0), (1, 1), (2, 5), (5, 5), (6, 8), (8, 8), (9, 9), (19, 19)]
    assert [table.seconds(7, n, 2) for n, _ in as_run] == pytest.approx([TABLE.seconds(7, n, 2) for _, n in as_run])
    tokens, computed = numpy.array(as_run, dtype=float).T
    assert table.by_tokens(tokens).tolist() == pytest.approx(TABLE.by_tokens(computed).tolist())
    assert table.scaled(2.0).seconds(0, 6) == pytest.approx(2 * TABLE.seconds(0, 8))
    assert CostTable.from_json(json.loads(json.dumps(asdict(table)))) == table


def test_tables_are_measured_and_corrected_at_numbers_that_are_recorded() -> None:
    assert set(KNOTS) <= set(Ladder.tokens(KNOTS[-1]).steps)


@pytest.mark.parametrize(
    ("knots", "reason"),
    [
        (((1.0, 1.0),), "at least two"),
        (((1.0, 1.0), (2.0, 0.5)), "2 tokens in 0.5 s cannot follow 1 in 1.0 s"),
        (((2.0, 1.0), (2.0, 2.0)), "2 tokens in 2.0 s cannot follow 2"),
        (((1.0, -1.0), (2.0, 2.0)), "1 tokens in -1.0 s"),
        (((1.0, 1.0), (2.0, float("nan"))), "2 tokens in nan s"),
    ],
)
def test_impossible_tables_are_refused(knots: tuple[tuple[float, float], ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CostTable(knots)
