"""Penalties, bans and log-probabilities of the target, at every position of a window."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams

from .conftest import MakeEngine
from .oracle import GREEDY, PROMPT


@pytest.mark.parametrize("length", [0, 5])
def test_penalties_and_bans_hold_at_every_position_of_a_window(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, length: int
) -> None:
    engine_free = make_engine(None)
    free = engine_free.generate([PROMPT], GREEDY)[0].token_ids
    asked = _awkward_params(list(free))
    engine_free.close()
    reference = [_penalised_greedy(target, params) for params in asked[3:]]
    engine = make_engine(
        draft, speculation_length=length, proposer="lookup_else_model", proposer_options={"shortest": 1}
    )
    biased, worded, allowed, fresh, repeated = (o.token_ids for o in engine.generate([PROMPT] * 5, asked))
    assert Counter(free).most_common(1)[0][0] not in biased
    assert free[0] not in worded
    assert (free[1], free[2]) not in set(pairwise(worded))
    assert set(allowed) <= set(range(10, 40))
    assert max(Counter(fresh).values()) < max(Counter(free).values())
    assert [list(fresh), list(repeated)] == reference


def _awkward_params(free: list[int]) -> list[SamplingParams]:
    """Return parameters that forbid what greedy decoding would write."""
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    often = Counter(free).most_common(1)[0][0]
    return [
        SamplingParams(**common, logit_bias={often: -100.0}),
        SamplingParams(**common, bad_word_ids=[[free[0]], [free[1], free[2]]]),
        SamplingParams(**common, allowed_token_ids=range(10, 40)),
        SamplingParams(**common, presence_penalty=2.0, frequency_penalty=2.0),
        SamplingParams(**common, repetition_penalty=1.8),
    ]


def _penalised_greedy(target: LanguageModel, params: SamplingParams) -> list[int]:
    """Uncached, one token at a time, the definition."""
    output: list[int] = []
    for _ in range(params.max_tokens or 0):
        logits = target.logits(torch.tensor([PROMPT + output]))[0, -1].float()
        for token, count in Counter(output).items():
            logits[token] -= params.presence_penalty + params.frequency_penalty * count
        for token in set(PROMPT + output):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        output.append(int(logits.argmax()))
    return output


def test_logprobs_are_the_targets_raw_ones(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, speculation_length=3)
    params = SamplingParams(temperature=0.5, top_k=5, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    engine.close()
    logits = target.logits(torch.tensor([[*PROMPT, *output.token_ids]]))[0, len(PROMPT) - 1 : -1]
    wanted = torch.log_softmax(logits.float(), -1)
    found = output.completions[0].logprobs
    assert found is not None
    assert [entry.token for entry in found] == list(output.token_ids)
    for entry, row in zip(found, wanted, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert set(entry.best) == set(row.topk(2).indices.tolist())


def test_the_head_sees_only_the_rows_that_are_judged(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(draft, speculation_length=3, prefill_chunk=16)
    rows: list[int] = []
    logits = engine.runner.logits
    monkeypatch.setattr(engine.runner, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    engine.submit(Request("a", tuple(range(5, 45)), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)))
    for _ in range(4):  # 40 prompt tokens in three chunks, then one window
        engine.step()
    assert rows == [1, 4]


def test_a_bad_word_that_is_no_text_is_refused_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="bad_words: the tokenizer cannot read"):
        engine.submit(Request("odd", (5, 6), SamplingParams(bad_words=["\ud800"])))
    assert not engine.has_work
    engine.submit(Request("odd", (5, 6), SamplingParams(temperature=0.0, max_tokens=2)))  # its id was not taken
    assert engine.run_until_done({"odd"}, progress=False)


def test_banned_ids_are_sorted_once_for_all_prompts_of_a_request(make_engine: MakeEngine) -> None:
    sequences, params = make_engine().sequences, SamplingParams(bad_word_ids=[[7, 8], [5], [7, 8]])
    assert sequences.bad_words(params) == ((5,), (7, 8))
    assert sequences.bad_words(params) is sequences.bad_words(params)
