"""Requests that limit speculation, reach the context limit, or are refused."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import RequestRefused, SamplingParams

from .conftest import MakeEngine
from .oracle import PROMPT


def test_speculation_can_be_refused_and_limited_by_a_request(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, speculation_length=4)
    common = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    never, two = engine.generate(
        [PROMPT, PROMPT], [SamplingParams(**common, speculate=False), SamplingParams(**common, speculation_length=2)]
    )
    assert never.stats.proposed == 0
    assert len(two.stats.tried_per_position) == 2
    assert never.token_ids == two.token_ids


def test_a_prompt_at_the_context_limit_gets_one_token_and_longer_ones_are_refused(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_model_len=32)
    (output,) = engine.generate([list(range(40, 71))], SamplingParams(temperature=0.0, max_tokens=None))
    assert len(output.token_ids) == 1
    with pytest.raises(RequestRefused, match="a prompt of 32 tokens leaves no room"):
        engine.generate([list(range(40, 72))])
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        engine.generate([[]])
    with pytest.raises(RequestRefused, match="token id 999 is not in the model's vocabulary"):
        engine.generate([[999]])
    with pytest.raises(ConfigError, match="stop_token_ids: token id 999"):
        engine.generate([[5]], SamplingParams(stop_token_ids=[999]))
    assert not engine.has_work


def test_what_leaves_nothing_to_write_is_refused(draft: LanguageModel, make_engine: MakeEngine) -> None:
    """Else all logits would be −∞."""
    engine = make_engine(draft)
    (stop, *_) = engine.target.stop_ids
    for excluded in (
        SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1),
        SamplingParams(allowed_token_ids=[stop], min_tokens=1),
        SamplingParams(allowed_token_ids=[7, 8], bad_word_ids=[[7]], stop_token_ids=[8], min_tokens=2),
        SamplingParams(allowed_token_ids=[7], bad_word_ids=[[7]]),
    ):
        with pytest.raises(RequestRefused, match=r"allowed_token_ids=\[.*nothing may be written"):
            engine.generate([PROMPT], excluded)
    for possible in (
        SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], max_tokens=2),
        SamplingParams(allowed_token_ids=[stop], min_tokens=1, ignore_eos=True, max_tokens=2),
        SamplingParams(allowed_token_ids=[7, 8], bad_word_ids=[[7]], max_tokens=2),
        SamplingParams(allowed_token_ids=[7], bad_word_ids=[[8, 7]], max_tokens=2),
    ):
        (output,) = engine.generate([PROMPT], possible)
        assert set(output.token_ids) <= set(possible.allowed_token_ids or ())
        assert output.finish_reason != "error"
