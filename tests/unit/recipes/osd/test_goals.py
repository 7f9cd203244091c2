"""Goals and bias, from figures whose answers are known."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.recipes.osd.bias import bias_by_arm, estimate, tail_shares
from distillspec.recipes.osd.goals import gain, goals, half


def rows(*alphas: float, segment: int = 0, tokens: int = 10) -> list[dict[str, Any]]:
    return [{"segment": segment, "tokens": tokens, "alpha": tokens * alpha} for alpha in alphas]


def sheet(alpha: float, lower: float = 0.0, upper: float = 0.0) -> list[dict[str, Any]]:
    return [{"positions": 10, "alpha": 10 * alpha, "lower": 10 * lower, "upper": 10 * upper}] * 2


def arm(first: float, second: float, third: float, kept: float) -> dict[str, Any]:
    """Twice as good in second halves; `kept` on the first exam when the second segment ends."""
    parts = (first, second, third)
    requests = [row for place, a in enumerate(parts) for row in rows(a, 2 * a, segment=place)]
    exams = {
        "0": {"0": sheet(first)},
        "1": {"0": sheet(kept), "1": sheet(second)},
        "2": {"0": sheet(1), "2": sheet(third)},
    }
    return {"requests": requests, "exams": exams}


def test_goals_are_about_second_halves_rivals_and_the_moment_of_return() -> None:
    arms = {"static": arm(0.2, 0.1, 0.2, 0.2), "flush": arm(0.3, 0.2, 0.24, 0.27)}
    offline = {f"{place}/1": {"exam": sheet(alpha)} for place, alpha in enumerate((0.3, 0.25, 0.24))}
    by_arm = goals(arms, offline, segments=3, seed=0)
    assert set(by_arm) == {"flush"}
    flush = by_arm["flush"]
    assert [cell["mean"] for cell in flush["gain"].values()] == pytest.approx([0.2, 0.08])
    assert [cell["mean"] for cell in flush["rival_gain"].values()] == pytest.approx([0.15, 0.04])
    assert list(flush["of_rival"].values()) == pytest.approx([0.2 / 0.15, 2.0])
    assert [cell["mean"] for cell in flush["of_offline"].values()] == pytest.approx([1.0, 0.8, 1.0])
    assert flush["kept"]["mean"] == pytest.approx(0.9)
    assert flush["returned"] == pytest.approx(0.8)


def test_a_gain_weighs_requests_by_their_tokens_and_pairs_them() -> None:
    before = [*rows(0.1, tokens=30), *rows(0.9, tokens=10)]
    after = [*rows(0.2, tokens=30), *rows(1.0, tokens=10)]
    change = gain(after, before, seed=0)
    assert change.mean == pytest.approx(0.1)
    assert change.high - change.low < 1e-9  # the same for every request, however hard it is
    assert [row["alpha"] for row in half(before, 0, 1)] == [9.0]


def test_the_estimate_takes_the_share_of_each_segment() -> None:
    first, second = sheet(0.44, lower=0.4, upper=0.5), sheet(0.16, lower=0.1, upper=0.2)
    arms = {"static": {"exams": {"0": {"0": first}, "1": {"0": first, "1": second}}}}
    shares = tail_shares(arms, {"1/0.5": {"exam": second}}, segments=2)
    assert shares == pytest.approx([0.4, 0.6])
    requests = [{"segment": 1, "lower": 3.0, "upper": 4.0}, {"segment": 0, "lower": 3.0, "upper": 3.0}]
    assert [row["alpha"] for row in estimate(requests, shares)] == pytest.approx([3.6, 3.0])
    bias = bias_by_arm(arms, shares)["static"]
    assert bias["estimate"] == pytest.approx(bias["alpha"]) == pytest.approx(0.3)
