"""Answers end where they should: by length, stop token or stop string, anywhere in a window."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import SequenceDelta
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner

from .conftest import MakeEngine
from .oracle import GREEDY, PROMPT, Oracle


@pytest.mark.parametrize(("mode", "steps"), [("always", 6), ("never", 30), ("sometimes", 15)])
def test_toy_drafts_of_known_acceptance(
    continuation: list[int], make_engine: MakeEngine, mode: str, steps: int
) -> None:
    engine = make_engine(proposer_object=Oracle(continuation, mode), speculation_length=4)
    (output,) = engine.generate([PROMPT], GREEDY)
    assert list(output.token_ids) == continuation[:30]
    # The first token comes with the prompt, and the last steps may draft less than they could.
    assert output.stats.steps in (steps, steps + 1)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_few_tokens_are_exactly_as_many_as_requested(
    continuation: list[int], make_engine: MakeEngine, most: int, mode: str
) -> None:
    engine = make_engine(proposer_object=Oracle(continuation, mode), speculation_length=8)
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True))
    assert list(output.token_ids) == continuation[:most]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_stop_token_anywhere_inside_a_window_ends_the_text_there(
    continuation: list[int], make_engine: MakeEngine, place: int
) -> None:
    stop = continuation[place]
    first = continuation.index(stop)
    engine = make_engine(proposer_object=Oracle(continuation), speculation_length=8)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    (output,) = engine.generate([PROMPT], params)
    assert list(output.token_ids) == continuation[: first + 1]
    assert (output.finish_reason, output.completions[0].stop_reason) == ("stop", stop)


def test_a_stop_string_inside_a_window_leaks_nothing_into_text_or_stream(
    target: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "tell me: one two STOP three four"
    words = target.tokenizer(text)["input_ids"]
    engine = make_engine(proposer_object=Oracle(words), speculation_length=8)
    params = SamplingParams(temperature=0.0, max_tokens=len(words), stop=["STOP"], ignore_eos=True)
    dictate(engine.runner, words, len(PROMPT), monkeypatch)
    engine.submit(Request("a", tuple(PROMPT), params))
    deltas: list[SequenceDelta] = []
    while engine.has_work:
        output = engine.step()
        deltas += output.deltas
        for finished in output.finished:
            done = finished
    assert done.text == "tell me: one two "
    assert "".join(delta.text for delta in deltas) == done.text
    assert not any("S" in delta.text for delta in deltas)
    assert [i for delta in deltas for i in delta.token_ids] == list(done.token_ids) == words[: text.index("STOP") + 4]


def dictate(runner: ModelRunner, words: list[int], prompt_length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the target no choice but the words, one after another."""
    places: list[int] = []  # the word that each wanted row of logits is for
    read, logits_of = runner.read, runner.logits

    def noting(rows: Sequence[RowInput]) -> torch.Tensor:
        for row in rows:
            end = row.start + len(row.tokens)
            places.extend(place - prompt_length + 1 for place in range(end - row.wanted, end))
        return read(rows)

    def dictated(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        for row, place in enumerate(places):
            if place < len(words):
                logits[row] = -100.0
                logits[row, words[place]] = 100.0
        places.clear()
        return logits

    monkeypatch.setattr(runner, "read", noting)
    monkeypatch.setattr(runner, "logits", dictated)


def test_min_tokens_forbids_stop_tokens_until_then(continuation: list[int], make_engine: MakeEngine) -> None:
    stop = continuation[2]
    engine = make_engine(proposer_object=Oracle(continuation), speculation_length=5)
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=8, stop_token_ids=[stop], ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    assert stop not in output.token_ids[:8]
    assert len(output.token_ids) >= 8


def test_accepted_tokens_behind_a_stop_are_not_counted(continuation: list[int], make_engine: MakeEngine) -> None:
    stop = continuation[2]
    engine = make_engine(proposer_object=Oracle(continuation), speculation_length=8)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    (output,) = engine.generate([PROMPT], params)
    written, stats = len(output.token_ids), output.stats
    # The first token comes with the prompt. All others were drafted, and eight were verified.
    assert (stats.proposed, stats.accepted, stats.acceptance_rate) == (8, written - 1, 1.0)
    assert stats.tried_per_position == stats.accepted_per_position == [1] * (written - 1) + [0] * (9 - written)


def test_text_that_fills_the_context_ends_by_length(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, max_model_len=48, speculation_length=8)
    (output,) = engine.generate([PROMPT[:20]], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == 28
    assert output.finish_reason == "length"
    engine.check_integrity()
