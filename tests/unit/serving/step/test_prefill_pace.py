"""Prompts are read at the pace that decoding rows bear, and all of it while nobody decodes."""

from __future__ import annotations

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.step.prefill_pace import LEAST, PATIENCE_S, PrefillPace

from ..conftest import MakeEngine, hf_greedy

PLAIN_S, TOKEN_S = 0.04, 0.001


def result(tokens: int, *, decoding: bool = True, plain_s: float = PLAIN_S) -> StepResult:
    view = BatchView((RowView("a", 10, 0),) if decoding else (), tokens, 0)
    return StepResult((), view, Plan(()), tokens, 0.0, 0.0, plain_s + TOKEN_S * tokens)


def learned(slowdown: float = 0.5) -> PrefillPace:
    pace = PrefillPace(512, slowdown)
    pace.observe(result(0))
    pace.observe(result(100))
    return pace


def test_nobody_decodes() -> None:
    assert PrefillPace(512, 0.5).tokens(0, 1, 1000) == 512
    assert learned().tokens(0, 1, 1000) == 512


def test_a_step_without_prompts_and_one_with_few_tokens_tell_the_cost() -> None:
    pace = PrefillPace(512, 0.5)
    assert pace.tokens(3, 1, 100) == 0
    pace.observe(result(100))
    assert pace.tokens(3, 1, 100) == 0, "nothing to compare it with"
    pace.observe(result(0, decoding=False, plain_s=9.0))
    assert pace.tokens(3, 1, 100) == 0, "an empty step says nothing"
    pace.observe(result(0))
    assert pace.tokens(3, 1, 100) == LEAST
    pace.observe(result(LEAST))
    assert pace.tokens(3, 1, 100) > LEAST
    small = PrefillPace(2, 0.5)
    small.observe(result(0))
    assert small.tokens(3, 1, 100) == 2


def test_an_engine_that_starts_under_load_learns_the_cost(target: LanguageModel, make_engine: MakeEngine) -> None:
    """There is always a prompt to read, so that no step is without one by itself."""
    engine = make_engine(max_slots=8, prefill_slowdown=100.0, prefill_chunk=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for number in range(12):
        engine.submit(Request(str(number), tuple((7 * place + number) % 200 + 3 for place in range(150)), params))
    read = []
    while engine.has_work:
        result = engine.step().result
        assert result is not None
        if result.view.rows:
            read.append(result.prefill_tokens)
    assert read.count(LEAST) <= 2
    assert max(read) == 64


@pytest.mark.parametrize("slowdown", [0.5, 1.0])
def test_a_step_takes_no_longer_than_allowed(slowdown: float) -> None:
    tokens = learned(slowdown).tokens(3, 1, 50)
    assert tokens * TOKEN_S == pytest.approx(slowdown * PLAIN_S, abs=TOKEN_S)


def test_few_rows_that_decode_do_not_hold_many_up() -> None:
    alike = learned().tokens(3, 1, 50)
    assert learned().tokens(3, 3, 50) == alike
    assert learned().tokens(3, 6, 50) == pytest.approx(2 * alike, abs=1)
    assert learned().tokens(1, 7, 50) == pytest.approx(7 * alike, abs=7)


def test_what_waits_is_read_in_time() -> None:
    """While it takes steps of plain + tokens · cost, all is read within the patience."""
    tokens = learned().tokens(3, 1, 400)
    assert tokens > 0.5 * PLAIN_S / TOKEN_S
    assert 400 / tokens * (PLAIN_S + tokens * TOKEN_S) == pytest.approx(PATIENCE_S, rel=0.02)
    assert learned().tokens(3, 1, int(PATIENCE_S / TOKEN_S)) == 512, "it cannot be done"


def test_it_follows_a_machine_that_changes() -> None:
    pace = learned()
    for _ in range(100):
        pace.observe(result(0, plain_s=4 * PLAIN_S))
        pace.observe(result(50, plain_s=4 * PLAIN_S))
    assert pace.tokens(3, 1, 20) == pytest.approx(4 * learned().tokens(3, 1, 20), rel=0.05)


def test_an_engine_reads_a_prompt_in_parts_beside_rows_that_decode(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long steps take on this machine, and even if a token seems to cost nothing."""
    monkeypatch.setattr("distillspec.serving.step.prefill_pace.PATIENCE_S", 1e6)
    long = [(7 * place) % 200 + 3 for place in range(150)]
    wanted = {"a": hf_greedy(target, long[:130], 40), "b": hf_greedy(target, long, 40)}
    engine = make_engine(max_slots=2, prefill_slowdown=1e-12, prefill_chunk=128)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.submit(Request("a", tuple(long[:130]), params))
    read, texts = [], {}
    while engine.has_work:
        if len(read) == 6:
            engine.submit(Request("b", tuple(long), params))
        output = engine.step()
        assert output.result is not None
        read.append((len(output.result.view.rows), output.result.prefill_tokens))
        texts.update({finished.request_id: list(finished.token_ids) for finished in output.finished})
    assert read[:2] == [(0, 128), (0, 2)], "nobody decoded"
    assert [tokens for rows, tokens in read[2:] if tokens] == [LEAST] * 5, "130 tokens were there already"
    assert texts == wanted


@pytest.mark.parametrize(("most", "waiting"), [(None, 2), (1, 1)])
def test_requests_count_that_have_a_slot_or_could_have_one(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, most: int | None, waiting: int
) -> None:
    asked: list[tuple[int, ...]] = []

    def tokens(pace: PrefillPace, *numbers: int) -> int:
        asked.append(numbers)
        return 128

    monkeypatch.setattr(PrefillPace, "tokens", tokens)
    monkeypatch.setattr("distillspec.serving.step.core.most_admitted", lambda *_: most)
    engine = make_engine(max_slots=3, prefill_slowdown=0.3, prefill_chunk=128, prefix_reuse=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.submit(Request("first", (5, 6, 7), params))
    engine.step()
    for number in range(4):
        engine.submit(Request(str(number), (5, 6, 7, number + 8), params))
    engine.step()
    assert asked == [(0, 1, 3), (1, waiting, 16)]
