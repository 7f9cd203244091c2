"""Answers are counted by domain, whether rows are written together or alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from distillspec.models import LanguageModel
from distillspec.recipes.spin.answers import Answers, SeededPrompt, answer
from distillspec.recipes.spin.idle import Idle
from distillspec.recipes.spin.sides import Side
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.base.fixed import FixedLength

TOKENS = 5
DOMAINS = "abaaba"
ASKED = [SeededPrompt(domain, (4 + seed, 5, 6), seed) for seed, domain in enumerate(DOMAINS)]


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, target: LanguageModel) -> Iterator[Engine]:
    """An engine of one or two slots whose clock counts how often it is read."""
    settings = EngineSettings(max_slots=request.param, max_model_len=64, compile=False, measure_costs_s=0.0)
    made = Engine(target, None, settings)
    ticks = count()
    made.clock = lambda: float(next(ticks))
    yield made
    made.close()


def written(engine: Engine, idle: Idle) -> Answers:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return answer("none", Side(engine, FixedLength(0)), ASKED, params, idle)


def test_tokens_and_seconds_are_those_of_the_domains(engine: Engine) -> None:
    answers = written(engine, idle := Idle())
    assert answers.tokens == len(ASKED) * TOKENS
    assert {domain: tokens for domain, (tokens, _) in answers.rows.items()} == {"a": 4 * TOKENS, "b": 2 * TOKENS}
    row_seconds = sum(seconds for _, seconds in answers.rows.values())
    assert 0 < row_seconds <= engine.slots * answers.seconds, "waiting for a slot does not count"
    assert (row_seconds > answers.seconds) == (engine.slots == 2), "rows that are written together share the time"
    assert answers.rate == answers.tokens / answers.seconds
    assert answers.by_domain["b"] == 2 * TOKENS / answers.rows["b"][1]
    assert idle.tokens > 0
