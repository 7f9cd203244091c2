"""Steps that raise: every request goes on, and no slot, memory or NaN is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams

from .conftest import MakeEngine, hf_greedy, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def submit(engine: Engine, count: int) -> None:
    for number, prompt in enumerate(prompts(count)):
        engine.submit(Request(str(number), tuple(prompt), GREEDY))


def test_an_admission_that_raises_leaves_no_owner(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [hf_greedy(target, prompt, 12) for prompt in prompts(4)]
    engine = make_engine(max_slots=2, speculation_length=0)
    pool = engine.sequences.pool
    reserve, raised = pool.reserve, list[str]()

    def failing(owner: str, tokens: int) -> Any:
        if owner == "1/0" and not raised:
            raised.append(owner)
            raise RuntimeError("no page is left")
        return reserve(owner, tokens)

    monkeypatch.setattr(pool, "reserve", failing)
    submit(engine, 4)
    with pytest.raises(RuntimeError, match="no page"):
        engine.step()
    engine.check_integrity()
    found = engine.run_until_done([str(number) for number in range(4)])
    assert [list(found[str(number)].token_ids) for number in range(4)] == wanted


def test_nan_of_a_step_that_raised_reaches_nobody(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = prompts()[4] * 2
    wanted = hf_greedy(target, long, 12)
    engine = make_engine(max_slots=1, speculation_length=0, prefix_reuse=False)
    submit(engine, 1)
    for _ in range(4):
        engine.step()
    verify = engine.sampler.verify

    def failing(*own: Any, **named: Any) -> Any:
        monkeypatch.setattr(engine.sampler, "verify", verify)
        with torch.inference_mode():
            for keys, _ in engine.runner.cache.layers.values():
                keys[0, :, 60:] = torch.nan
        raise RuntimeError("no verdict")

    monkeypatch.setattr(engine.sampler, "verify", failing)
    with pytest.raises(RuntimeError, match="no verdict"):
        engine.step()
    engine.abort("0")
    engine.submit(Request("long", tuple(long), GREEDY))
    found = engine.run_until_done(["long"])["long"]
    assert found.finish_reason == "length"
    assert list(found.token_ids) == wanted
