"""An engine over a model without a tokenizer answers token ids with token ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams

from .conftest import MakeEngine, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture
def engine(target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine) -> Engine:
    bare = replace(target, tokenizer=None)
    return make_engine(replace(draft, tokenizer=None), model=bare)


def test_ids_are_answered_as_with_a_tokenizer(engine: Engine, target: LanguageModel, make_engine: MakeEngine) -> None:
    bare = [engine.generate([ids], GREEDY)[0] for ids in prompts(4)]
    engine.close()
    whole = make_engine(model=target).generate(prompts(4), GREEDY)
    assert [output.token_ids for output in bare] == [output.token_ids for output in whole]
    assert {output.text for output in bare} == {None}
    assert all(output.text for output in whole)


def test_deltas_have_no_text(engine: Engine) -> None:
    engine.submit(Request("a", (5, 6, 7), GREEDY))
    deltas = [delta for _ in range(40) if engine.has_work for delta in engine.step().deltas]
    assert sum(len(delta.token_ids) for delta in deltas) > 0
    assert {delta.text for delta in deltas} == {""}


def test_what_needs_text_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="tiny has no tokenizer, so it cannot read text"):
        engine.generate(["abc"])
    with pytest.raises(ConfigError, match="stop needs a tokenizer, which this model lacks; use stop_token_ids"):
        engine.generate([[5, 6]], SamplingParams(stop=["x"]))
    with pytest.raises(ConfigError, match="bad_words needs a tokenizer, which this model lacks; use bad_word_ids"):
        engine.generate([[5, 6]], SamplingParams(bad_words=["x"]))
    answer = engine.generate([[5, 6]], replace(GREEDY, bad_word_ids=((9,),)))[0]
    assert not engine.has_work
    assert 9 not in answer.token_ids
