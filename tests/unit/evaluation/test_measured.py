"""Ways to decode, compared prompt by prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from distillspec.evaluation.measured import (
    Decoders,
    MakeDecoders,
    MeasuredSpeedup,
    Prompt,
    Run,
    grouped,
    in_turn,
    measure_speedup,
)
from distillspec.models import LanguageModel
from distillspec.types import SamplingPolicy

PROMPTS = [[1], [2], [3], [4], [5]]
SECONDS = {"plain": 10.0, "speculative": 8.0, "served": 5.0}
ALL = list(SECONDS)

Calls = list[tuple[str, int]]


def scripted(calls: Calls, ways: Sequence[str]) -> MakeDecoders:
    """Return decoders that write ten tokens in five runs, with the seconds of each way."""

    def decode(way: str, prompts: Sequence[Prompt]) -> Run:
        ((number,),) = prompts
        calls.append((way, number))
        return Run(SECONDS[way] * number, 10, 5)

    @contextmanager
    def decoders(*parts: object) -> Iterator[Decoders]:
        yield Decoders(*[partial(decode, way) for way in ways])

    return decoders


def measured(draft: LanguageModel, target: LanguageModel, ways: Sequence[str]) -> tuple[MeasuredSpeedup, Calls]:
    calls: Calls = []
    policy = SamplingPolicy(temperature=0.0)
    groups = grouped(PROMPTS, 1, 8)
    return measure_speedup(draft, target, groups, policy, 2, 10, decoders=scripted(calls, ways)), calls


def test_ways_take_turns_at_being_first(draft: LanguageModel, target: LanguageModel) -> None:
    found, calls = measured(draft, target, ALL)
    assert calls.pop(0) == ("speculative", 1)  # to warm up
    assert [calls[place][0] for place in range(0, len(calls), 3)] == [*ALL, *ALL][:5]
    assert sorted(calls) == sorted((way, prompt) for way in ALL for (prompt,) in PROMPTS)
    assert found.ratio.mean == pytest.approx(1.25)
    assert found.served is not None
    assert found.served.mean == pytest.approx(2.0)
    assert found.plain_tokens_per_s == pytest.approx(50 / 150)
    assert found.served_tokens_per_s == pytest.approx(50 / 75)
    assert (found.tau, found.prompts) == (2.0, 5)


def test_what_learns_from_prompts_decodes_each_once(draft: LanguageModel, target: LanguageModel) -> None:
    _, calls = measured(draft, target, ALL)
    assert [prompt for way, prompt in calls if way == "served"] == [1, 2, 3, 4, 5]


def test_without_a_server_two_ways_are_compared(draft: LanguageModel, target: LanguageModel) -> None:
    found, calls = measured(draft, target, ALL[:2])
    assert found.served is found.served_tokens_per_s is None
    assert calls[1:5] == [("plain", 1), ("speculative", 1), ("speculative", 2), ("plain", 2)]


def test_prompts_side_by_side_are_measured_in_groups_that_share_none() -> None:
    assert grouped(PROMPTS, 2, 8) == [[[1], [2]], [[3], [4]]]
    assert grouped(PROMPTS, 2, 1) == [[[1], [2]]]
    assert grouped(PROMPTS, 8, 8) == [PROMPTS], "too few for one group"
    assert grouped([], 2, 8) == []


def test_each_side_is_at_each_place_equally_often() -> None:
    rounds = [in_turn("abc", number) for number in range(6)]
    assert all(sorted(own) == ["a", "b", "c"] for own in rounds)
    assert [Counter(own[place] for own in rounds) for place in range(3)] == [Counter(a=2, b=2, c=2)] * 3
    assert rounds[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_a_single_side_is_always_first() -> None:
    assert in_turn({"only": 1}, 7) == ["only"]
