"""Prompts that begin alike are read once, by the target and by the draft, and the text is what it would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.draft_model import DraftModel

from ..models.state_drafts import state_draft
from .conftest import MakeEngine, hf_greedy

HEAD = [(7 * place) % 200 + 3 for place in range(60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def counted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of each row that a runner reads from now on."""
    read: list[int] = []
    prepare: Callable[..., Any] = runner.prepare

    def noted(rows: list[RowInput], *positions: int) -> Any:
        read.extend(len(row.tokens) for row in rows)
        return prepare(rows, *positions)

    monkeypatch.setattr(runner, "prepare", noted)
    return read


def draft_runner(engine: Engine) -> ModelRunner:
    return engine.proposer.runner  # type: ignore[union-attr]


def test_what_slots_hold_is_planned_as_read(make_engine: MakeEngine) -> None:
    text = [(11 * place) % 200 + 3 for place in range(1000)]
    engine = make_engine(max_slots=4, max_model_len=1100, prefill_chunk=512)
    engine.generate([text], GREEDY)
    for name in range(3):
        engine.submit(Request(str(name), (*text, 5, 6, 7, 8 + name), GREEDY))
    result = engine.step().result
    assert result is not None
    assert (len(result.rows), result.prefill_tokens) == (3, 12)


@pytest.mark.parametrize(
    ("slots", "prefix_reuse", "page_tokens", "kind"),
    [
        (1, True, 0, "tokens"),
        (1, False, 16, "tokens"),
        (2, False, 0, "tokens"),
        (2, True, 16, "features"),
        (4, True, 0, "features"),
        (4, False, 0, "tokens"),
        (4, True, 16, "tokens"),
    ],
)
def test_answers_to_one_prompt_read_it_once(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    prefix_reuse: bool,
    page_tokens: int,
    kind: str,
) -> None:
    wanted = hf_greedy(target, HEAD, 8)
    drafts = draft if kind == "tokens" else state_draft("features", target)
    settings = {"prefix_reuse": prefix_reuse, "page_tokens": page_tokens, "prefill_chunk": 16}
    engine = make_engine(drafts, max_slots=slots, speculation_length=2, **settings)
    read, drafted = counted(engine.runner, monkeypatch), counted(draft_runner(engine), monkeypatch)
    (output,) = engine.generate([HEAD], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=4))
    assert [list(answer.token_ids) for answer in output.completions] == [wanted] * 4
    assert [answer.stats.prefix_tokens for answer in output.completions] == [0, 59, 59, 59]
    assert sum(tokens for tokens in read if tokens > 3) == 60  # windows have three tokens
    assert sum(tokens > 8 for tokens in drafted) == 1, "the draft's work is copied, too"
    engine.check_integrity()
    engine.generate([HEAD], GREEDY)
    assert sum(tokens for tokens in read if tokens > 3) == (60 if prefix_reuse else 120)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)])
@pytest.mark.parametrize("copied", [False, True], ids=["taken over", "copied"])
@pytest.mark.parametrize("kind", ["tokens", "eagle"])
def test_a_draft_reads_only_what_its_own_slot_lacks(
    target: LanguageModel,
    draft: LanguageModel,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    copied: bool,
    kind: str,
) -> None:
    draft = draft if kind == "tokens" else state_draft("eagle", target, noise=0.02)
    asked = [*HEAD, *((9, 10, 11) if copied else ()), 12]
    fresh = make_engine(draft, speculation_length=2, prefix_reuse=False)
    (wanted,) = fresh.generate([asked], params)
    engine = make_engine(draft, speculation_length=2)
    engine.generate([[*HEAD, *range(70, 140)] if copied else HEAD], params)
    read = counted(draft_runner(engine), monkeypatch)
    (output,) = engine.generate([asked], params)
    assert output.token_ids == wanted.token_ids
    assert output.stats.prefix_tokens >= 60
    assert (output.stats.proposed, output.stats.accepted) == (wanted.stats.proposed, wanted.stats.accepted)
    assert max(read) <= 8, "the prompt was not read again"


def test_a_new_draft_reads_everything(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, speculation_length=2)
    (wanted,) = engine.generate([[*HEAD, 12]], GREEDY)
    engine.use_draft(draft, "again")
    engine.step()
    engine.submit(Request("a", (*HEAD, 12), GREEDY))
    engine.step()
    (sequence,) = engine.sequences.running
    assert isinstance(engine.proposer, DraftModel)
    assert (sequence.stats.prefix_tokens, engine.proposer.state(sequence.id).computed) == (60, 0)
    assert engine.run_until_done({"a"})["a"].token_ids == wanted.token_ids


def test_free_texts_give_way_to_requests(target: LanguageModel, make_engine: MakeEngine) -> None:
    """Memory for 130 tokens: the first prompt's text has to go for the third."""
    asked = [[20 + number] * 50 for number in range(3)]
    wanted = {prompt[0]: hf_greedy(target, prompt, 8) for prompt in asked}
    engine = make_engine(max_slots=8, max_cache_tokens=130, speculation_length=0)
    for prompt in (*asked, asked[2], asked[1], asked[0]):
        (output,) = engine.generate([prompt], GREEDY)
        engine.check_integrity()
        assert list(output.token_ids) == wanted[prompt[0]]
    assert sum(engine.sequences.pool.slot_tokens) <= 130
    found = [engine.sequences.pool.longest_prefix(prompt, ("default", "")) for prompt in asked]
    assert [prefix is not None for prefix in found] == [True, True, False]


@pytest.mark.parametrize("n", [1, 6])
def test_rows_that_share_a_prompt_fit_together(target: LanguageModel, make_engine: MakeEngine, n: int) -> None:
    """Six answers to 60 tokens: 6 × 72 tokens of memory by themselves, 48 + 6 × 24 with shared pages."""
    asked = [HEAD] if n > 1 else [[*HEAD[:-2], 9, 10 + number] for number in range(6)]
    wanted = [hf_greedy(target, prompt, 8) for prompt in asked for _ in range(n)]
    engine = make_engine(
        max_slots=6, max_model_len=128, max_cache_tokens=200, page_tokens=8, speculation_length=0, prefill_chunk=128
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=n)
    engine.generate([HEAD], GREEDY)
    for name, prompt in enumerate(asked):
        engine.submit(Request(str(name), tuple(prompt), params))
    most, outputs = 0, []
    while engine.has_work:
        outputs += engine.step().finished
        most = max(most, len(engine.sequences.running))
        engine.check_integrity()
    assert most == 6
    answers = [answer for output in sorted(outputs, key=lambda one: one.request_id) for answer in output.completions]
    assert [list(answer.token_ids) for answer in answers] == wanted
    assert sum(answer.stats.preemptions for answer in answers) == 0
