"""After a tenant is forgotten the engine keeps no text of it, and others' texts are what they would have been."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Engine, Request, RequestOutput, SamplingParams
from distillspec.serving.proposers.base import caches_of

from ..models.state_drafts import state_draft
from .conftest import MakeEngine, hf_greedy, prompts

LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def caches(engine: Engine) -> list[SlotCache]:
    return [engine.runner.cache, *caches_of(engine.proposer)]


def values(engine: Engine) -> int:
    """Numbers in the caches that are not zero."""
    return sum(int(held.count_nonzero()) for cache in caches(engine) for held in cache.tensors())


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step().finished})
    return done


@pytest.mark.parametrize(("page_tokens", "kind"), [(0, "tokens"), (16, "features"), (0, "none")])
def test_idle_slots_hold_no_text_and_no_value(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, page_tokens: int, kind: str
) -> None:
    own = {"tokens": draft, "features": state_draft("eagle", target), "none": None}[kind]
    wanted = hf_greedy(target, prompts(1)[0], 24)
    engine = make_engine(own, page_tokens=page_tokens, speculation_length=3, compile=False)
    engine.generate(prompts(4), LONG)
    assert values(engine) > 0
    forgotten = engine.forget_tenant("default")
    finish(engine)
    assert forgotten.done()
    assert values(engine) == 0
    assert not any(engine.sequences.pool.contents)
    assert engine.last_result is None
    engine.check_integrity()
    assert list(engine.generate(prompts(1), LONG)[0].token_ids) == wanted


@pytest.mark.parametrize(("page_tokens", "steps"), [(0, 2), (16, 5)])
def test_what_runs_goes_when_it_has_ended_and_others_write_on(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, page_tokens: int, steps: int
) -> None:
    """Two slots and five requests: some wait, and slots change hands between the tenants."""
    asked = prompts(5)
    wanted = [hf_greedy(target, prompt, 24) for prompt in asked]
    engine = make_engine(draft, page_tokens=page_tokens, speculation_length=3, max_slots=2, compile=False)
    for place, prompt in enumerate(asked):
        engine.submit(Request(str(place), tuple(prompt), LONG, tenant="gone" if place % 2 else "stays"))
    for _ in range(steps):
        engine.step()
    engine.forget_tenant("gone")
    done = finish(engine)
    assert [list(done[str(place)].token_ids) for place in range(5)] == wanted
    engine.check_integrity()
    gone = [tuple(asked[place]) for place in (1, 3)]
    assert not any(tuple(held[: len(prompt)]) == prompt for held in engine.sequences.pool.contents for prompt in gone)
    assert not engine.has_work


def test_proposers_learn_nothing_of_what_ran_when_its_tenant_was_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine(proposer="suffix", speculation_length=6, compile=False)
    prompt = tuple(prompts(2)[1])

    def steps(name: str, forget: bool = False) -> int:
        engine.submit(Request(name, prompt, LONG, tenant="a"))
        engine.step()
        if forget:
            engine.forget_tenant("a")
        return finish(engine)[name].stats.steps

    first = steps("0", forget=True)
    assert steps("1", forget=True) == first
    assert steps("2") == first
    assert steps("3") < first


def test_tenants_that_may_not_be_kept_teach_proposers_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(proposer="suffix", speculation_length=6, compile=False)
    prompt, asked = tuple(prompts(2)[1]), list[str]()

    def may_keep(tenant: str) -> bool:
        asked.append(tenant)
        return tenant != "a"

    engine.may_keep = may_keep
    found: dict[str, list[Any]] = {"a": [], "b": []}
    for name in range(4):
        tenant = "ab"[name % 2]
        engine.submit(Request(str(name), prompt, LONG, tenant=tenant))
        found[tenant].append(finish(engine)[str(name)].stats.steps)
    assert asked == ["a", "b", "a", "b"]
    assert found["a"][0] == found["a"][1] == found["b"][0] > found["b"][1]
