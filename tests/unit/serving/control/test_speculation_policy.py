"""What steps that read prompts say about plain and speculating ones."""

from __future__ import annotations

import pytest

from distillspec.serving.control.speculation_policy import FEWEST_TO_JUDGE, SpeculationPolicy

DECODING_S, PROMPTS_S = 0.013, 0.087


@pytest.mark.parametrize("prompts_s", [0.0, DECODING_S, 2 * DECODING_S])
def test_slow_speculation_is_found_out_beside_prompts(prompts_s: float) -> None:
    policy = SpeculationPolicy()
    for _ in range(3 * FEWEST_TO_JUDGE):
        policy.step_passed(1, True, None)
        policy.saw(1.5 * DECODING_S + prompts_s, DECODING_S, prompts_s, (2.0, 2.0))
    assert policy.gain == pytest.approx(1 / 1.5, rel=0.15)
    policy.judge(1.0, 1.2)
    assert policy.speculates == (prompts_s > DECODING_S), "steps beside longer prompts count less"
