"""What steps that read prompts say about plain and speculating ones."""

from __future__ import annotations

import itertools

import pytest

from distillspec.serving.control.speculation_policy import FEWEST_TO_JUDGE, TRY_EVERY, SpeculationPolicy

DECODING_S, PROMPTS_S = 0.013, 0.087


@pytest.mark.parametrize("prompts_s", [0.0, DECODING_S, 2 * DECODING_S])
def test_slow_speculation_is_found_out_beside_prompts(prompts_s: float) -> None:
    policy = SpeculationPolicy()
    for _ in range(3 * FEWEST_TO_JUDGE):
        policy.step_passed(1, True, None)
        policy.measured.saw(1.5 * DECODING_S + prompts_s, DECODING_S, prompts_s, (2.0, 2.0))
    assert policy.measured.gain == pytest.approx(1 / 1.5, rel=0.15)
    policy.judge(1.0, 1.2)
    assert policy.speculates == (prompts_s > DECODING_S), "steps beside longer prompts count less"


def looks(policy: SpeculationPolicy, steps: int, rows: int) -> list[int]:
    """Decode plainly. Return the steps before which a trial was looked at, and started by none."""
    found = []
    for number in range(steps):
        found += [number] if policy.trial_is_due else []
        policy.step_passed(rows, False, None)
    return found


def test_looks_at_trials_that_start_none_become_rarer() -> None:
    policy = SpeculationPolicy()
    policy.step_passed(8, True, None)
    found = looks(policy, 2000, 8)
    assert found[:3] == [TRY_EVERY, 2 * TRY_EVERY, 3 * TRY_EVERY]
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps == sorted(gaps)
    assert all(gap <= 0.25 * before + TRY_EVERY for before, gap in zip(found, gaps, strict=False))
    assert len(found) < 30


def test_fewer_rows_are_looked_at_soon() -> None:
    policy = SpeculationPolicy()
    policy.step_passed(8, True, None)
    looks(policy, 1000, 8)
    assert looks(policy, 400, 7)[0] > TRY_EVERY, "hardly fewer"
    assert looks(policy, 100, 4)[0] <= TRY_EVERY


def test_speculation_begins_the_count_of_looks_anew() -> None:
    policy = SpeculationPolicy()
    for _ in range(2):
        policy.step_passed(8, True, None)
        assert looks(policy, 100, 8)[:2] == [TRY_EVERY, 2 * TRY_EVERY]
