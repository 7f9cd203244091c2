"""Sides of a comparison by turns: each is first equally often, and all take part in every round."""

from __future__ import annotations

from collections import Counter

from distillspec.evaluation.turns import in_turn


def test_each_side_is_at_each_place_equally_often() -> None:
    rounds = [in_turn("abc", number) for number in range(6)]
    assert all(sorted(own) == ["a", "b", "c"] for own in rounds)
    assert [Counter(own[place] for own in rounds) for place in range(3)] == [Counter(a=2, b=2, c=2)] * 3
    assert rounds[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_a_single_side_is_always_first() -> None:
    assert in_turn({"only": 1}, 7) == ["only"]
