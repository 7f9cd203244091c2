"""Equation 10 beside the exact length of a tree."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from distillspec.recipes.smartspec.tree_lengths import lengths, write_lengths


@pytest.mark.parametrize("alpha", [0.6, 0.8])
def test_one_candidate_a_head_is_a_chain(alpha: float) -> None:
    exact, _ = lengths(alpha, 1)
    assert exact == pytest.approx(1 + alpha + alpha**2 + alpha**3)


def test_more_candidates_give_more_tokens_up_to_one_a_level() -> None:
    exact = [lengths(0.6, width)[0] for width in (1, 2, 3)]
    assert 1 < exact[0] < exact[1] < exact[2] < 4


def test_the_equation_is_not_near_the_exact_length(tmp_path: Path) -> None:
    (claim,) = write_lengths(tmp_path)
    assert not claim.holds
    with (tmp_path / "eq10.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["alpha"], row["width"]) for row in rows] == [(a, w) for a in ("0.6", "0.8") for w in "123"]
    wide = rows[-1]
    assert float(wide["eq10"]) > 4 > float(wide["exact"])  # more tokens than the tree has levels
