"""Rewards of drafts: tokens and seconds are summed before they are divided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.serving.selection.rewards import ALL, Reward, Rewards, passes_s, row_rewards

from .steps import verified


def test_rates_are_sums_divided_and_forgotten_by_draft_or_by_what_they_are_of() -> None:
    rewards = Rewards()
    for tokens, seconds in ((4, 0.1), (1, 0.4)):
        rewards.add((ALL, "good"), tokens, seconds)
    rewards.add((ALL, "bad"), 1, 0.5)
    rewards.add(("1/0", "good"), 3, 1.0)
    assert rewards.rates(ALL) == {"good": pytest.approx(10.0), "bad": pytest.approx(2.0)}
    assert rewards.rate(("1/0", "good")) == 3.0
    assert rewards.rate(("1/0", "bad")) is None
    rewards.forget("good")
    assert (rewards.rates(ALL), rewards.rates("1/0")) == ({"bad": 2.0}, {})
    rewards.keep_only(["1/0"])
    assert rewards.rates(ALL) == {}


def test_a_row_is_rewarded_for_the_seconds_of_its_own_draft() -> None:
    chosen = {"1/0": "a", "2/0": "dear", "3/0": None}
    result = replace(verified(chosen, {"a": (3, 2), "dear": (2, 1)}), target_s=0.1, drafted_s={"a": 0.02, "dear": 0.05})
    assert row_rewards(result, chosen) == [
        Reward("1/0", "a", 2.0, pytest.approx(0.12), 3),
        Reward("2/0", "dear", 1.0, pytest.approx(0.15), 2),
    ]


def test_passes_are_those_of_drafts_where_they_are_told_apart() -> None:
    result = replace(verified({"1/0": "a"}, {"a": (3, 2)}), draft_s=0.09, drafted_s={"a": 0.02, "b": 0.05})
    assert passes_s(result, {"a", "b", "other"}) == pytest.approx(0.07)
    assert passes_s(result, ()) == 0.0
    alone = replace(result, drafted_s={})
    assert passes_s(alone, {"a"}) == 0.09
    assert passes_s(alone, ()) == 0.0
