"""Gain of speculation by measured steps, where these read prompts too."""

from __future__ import annotations

from distillspec.serving.control.measured_gain import MeasuredGain

DECODING_S, PROMPTS_S = 0.013, 0.087


def test_prompts_that_take_longer_make_no_plain_step_slow() -> None:
    """44 ms too little was predicted for each prompt: that is 3.4 times a plain step."""
    measured = MeasuredGain()
    for _ in range(50):
        measured.steps += 1
        measured.saw(DECODING_S + PROMPTS_S + 0.044, DECODING_S, PROMPTS_S, None)
    assert 0.9 < measured.plain_rate(1.0) <= 1.0


def test_a_step_shorter_than_its_prompts_were_believed_to_be_counts() -> None:
    measured = MeasuredGain()
    measured.steps += 1
    measured.saw(0.001, DECODING_S, DECODING_S, None)
    assert measured.plain_rate(1.0) > 1.0
