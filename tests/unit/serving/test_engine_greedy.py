"""Greedy output is transformers' own, token by token, whatever the proposer, length, batch or interruption."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams

from .conftest import MakeEngine, hf_greedy, prompts

pytestmark = pytest.mark.numerics
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def expected(target: LanguageModel) -> list[list[int]]:
    return [hf_greedy(target, prompt, 24) for prompt in prompts()]


def test_no_choice_is_within_rounding(target: LanguageModel, expected: list[list[int]]) -> None:
    """So these tests do not depend on the machine: float32's rounding moves these logits by 1e-5."""
    for prompt, answer in zip(prompts(), expected, strict=True):
        best = target.logits(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3


@pytest.mark.parametrize(
    ("proposer", "length", "slots"),
    [
        *(("draft_model", length, 4) for length in range(9)),
        *(("prompt_lookup", length, 4) for length in (1, 3, 8)),
        *(("lookup_else_model", length, 4) for length in (1, 2, 5, 8)),
        *product(["draft_model", "lookup_else_model"], [1, 8], [1]),
        ("prompt_lookup", 3, 1),
        ("draft_model", 0, 1),
    ],
)
def test_greedy_is_transformers_own(
    expected: list[list[int]],
    draft: LanguageModel,
    make_engine: MakeEngine,
    proposer: str,
    length: int,
    slots: int,
) -> None:
    engine = make_engine(draft, proposer=proposer, speculation_length=length, max_slots=slots)
    outputs = engine.generate(prompts(), GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    engine.check_integrity()
    proposed = sum(output.stats.proposed for output in outputs)
    assert (proposed > 0) == (length > 0)


def test_a_truncated_draft_changes_nothing(
    expected: list[list[int]], truncated_draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(truncated_draft, speculation_length=3)
    outputs = engine.generate(prompts(), GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.accepted for output in outputs) > 0


def test_long_prompts_read_in_chunks_change_nothing(
    expected: list[list[int]], draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, prefill_chunk=16, prefix_reuse=False)
    assert [list(output.token_ids) for output in engine.generate(prompts(), GREEDY)] == expected


@pytest.mark.parametrize("proposer", ["draft_model", "prompt_lookup", "lookup_else_model"])
def test_a_forced_preemption_changes_nothing(
    expected: list[list[int]], draft: LanguageModel, make_engine: MakeEngine, proposer: str
) -> None:
    engine = make_engine(draft, proposer=proposer, max_cache_tokens=130, max_slots=4)
    outputs = engine.generate(prompts(), GREEDY)
    assert [list(output.token_ids) for output in outputs] == expected
    assert sum(output.stats.preemptions for output in outputs) > 0
    engine.check_integrity()


def test_a_more_urgent_request_takes_a_slot_and_both_are_answered(
    expected: list[list[int]], draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_slots=1)
    engine.submit(Request("slow", tuple(prompts()[0]), GREEDY, priority=1))
    for _ in range(3):
        engine.step()
    engine.submit(Request("urgent", tuple(prompts()[3]), GREEDY, priority=0))
    done = {}
    while engine.has_work:
        for output in engine.step().finished:
            done[output.request_id] = output
            engine.check_integrity()
    assert list(done) == ["urgent", "slow"]
    assert list(done["slow"].token_ids) == expected[0]
    assert list(done["urgent"].token_ids) == expected[3]
    assert done["slow"].stats.preemptions == 1


def test_a_shared_beginning_is_read_once(target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine) -> None:
    head = prompts()[4]
    asked = [[*head, 50 + i, 60 + i] for i in range(5)]
    wanted = [hf_greedy(target, prompt, 8) for prompt in asked]
    engine = make_engine(draft, max_slots=2)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=8))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(output.stats.prefix_tokens >= len(head) for output in outputs) >= 3


def test_what_the_cache_holds_is_not_reported_as_read(make_engine: MakeEngine) -> None:
    engine = make_engine()
    read = []
    for end in (60, 61):
        engine.submit(Request(str(end), (*range(3, 50), end), SamplingParams(temperature=0.0, max_tokens=2)))
        result = engine.step().result
        assert result is not None
        assert result.view.prefill_tokens == result.prefill_tokens
        read.append(result.prefill_tokens)
    assert read == [48, 1]


def test_an_idle_engine_remembers_more_than_the_last_prompt(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    asked = [[20 + i] * 40 for i in range(3)]
    wanted = [hf_greedy(target, prompt, 5) for prompt in asked]
    engine = make_engine(draft, max_slots=3)
    for again in range(2):
        for prompt, answer in zip(asked, wanted, strict=True):
            (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=5))
            assert output.stats.prefix_tokens == (39 if again else 0)
            assert list(output.token_ids) == answer
    engine.check_integrity()


def test_length_zero_touches_no_draft_and_runs_the_target_once_a_token(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, speculation_length=0, max_slots=1)
    (output,) = engine.generate([prompts()[0]], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert engine.runner.passes == len(output.token_ids) == 10
    assert engine.proposer.runner.passes == 0  # type: ignore[union-attr]


def test_every_step_is_one_pass_of_the_target_and_one_pass_of_the_draft_a_token(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, speculation_length=3, max_slots=4)
    for i, prompt in enumerate(prompts(4)):
        engine.submit(
            Request(str(i), tuple(prompt[:6]), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        )
    engine.step()  # reads the prompts
    proposer = engine.proposer
    for _ in range(5):
        before = engine.runner.passes, proposer.runner.passes  # type: ignore[union-attr]
        engine.step()
        assert engine.runner.passes == before[0] + 1
        assert proposer.runner.passes == before[1] + 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "smollm3", "gpt2", "mixtral"]
)
def test_any_decoder_only_architecture_runs(
    kind: str, random_model: Callable[[str], LanguageModel], make_engine: MakeEngine
) -> None:
    model = random_model(kind)
    asked = prompts(4)
    wanted = [hf_greedy(model, prompt, 12) for prompt in asked]
    engine = make_engine(model=model, proposer="prompt_lookup", prefill_chunk=24, max_slots=3)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=12))
    assert [list(output.token_ids) for output in outputs] == wanted
