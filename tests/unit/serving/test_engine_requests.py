"""What a request asks for, it gets: limits, stops, bans, penalties, log-probabilities; and what goes wrong stays its
own."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Request, RequestRefused, SamplingParams
from distillspec.serving.proposers.base import ProposalRequest
from distillspec.serving.requests import SequenceDelta
from distillspec.serving.tree import TokenTree

from .conftest import MakeEngine, prompts

PROMPT = prompts()[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


class Oracle:
    """Proposes what greedy decoding will write (`always`), never that, or that in every second position."""

    version = "oracle"

    def __init__(self, continuation: list[int], mode: str = "always") -> None:
        self.continuation, self.mode = continuation, mode

    def propose(self, requests: list[ProposalRequest]) -> list[TokenTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: ProposalRequest) -> TokenTree:
        done = request.sequence.output_length
        tokens = self.continuation[done : done + request.length]
        wrong = [(token + 1) % 250 for token in tokens]
        chosen = {"always": tokens, "never": wrong, "sometimes": tokens[:1] + wrong[1:]}[self.mode]
        return TokenTree.chain(chosen)

    def committed(self, sequence: object, tree: TokenTree, path: object) -> None: ...

    def move(self, moves: object) -> None: ...

    def forget(self, sequence_id: str) -> None: ...


@pytest.mark.parametrize(("mode", "steps"), [("always", 6), ("never", 30), ("sometimes", 15)])
def test_toy_drafts_of_known_acceptance(
    continuation: list[int], make_engine: MakeEngine, mode: str, steps: int
) -> None:
    engine = make_engine(proposer_object=Oracle(continuation, mode), speculation_length=4)
    (output,) = engine.generate([PROMPT], GREEDY)
    assert list(output.token_ids) == continuation[:30]
    # The first token comes with the prompt; the last steps may draft less than they could.
    assert output.stats.steps in (steps, steps + 1)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_few_tokens_are_exactly_as_many_as_asked(
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
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    text = "tell me: one two STOP three four"
    words = target.tokenizer(text)["input_ids"]
    engine = make_engine(proposer_object=Oracle(words), speculation_length=8)
    # A bias leaves the target no choice but the words.
    params = SamplingParams(temperature=0.0, max_tokens=len(words), stop=["STOP"], ignore_eos=True)
    engine.core.runner = Dictating(engine.core.runner, words, len(PROMPT))  # type: ignore[assignment]
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


class Dictating:
    """A runner whose target says given words, one after another."""

    def __init__(self, inner: object, words: list[int], prompt_length: int) -> None:
        self.inner, self.words, self.prompt_length = inner, words, prompt_length
        self.places: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def read(self, rows: list) -> torch.Tensor:  # type: ignore[type-arg]
        for row in rows:
            end = row.start + len(row.tokens)
            self.places += [place - self.prompt_length + 1 for place in range(end - row.wanted, end)]
        return self.inner.read(rows)  # type: ignore[attr-defined]

    def read_uneven(self, rows: list) -> torch.Tensor:  # type: ignore[type-arg]
        return self.read(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.inner.logits(hidden)  # type: ignore[attr-defined]
        for row, place in enumerate(self.places):
            if place < len(self.words):
                logits[row] = -100.0
                logits[row, self.words[place]] = 100.0
        self.places = []
        return logits


def test_min_tokens_forbids_stop_tokens_until_then(continuation: list[int], make_engine: MakeEngine) -> None:
    stop = continuation[2]
    engine = make_engine(proposer_object=Oracle(continuation), speculation_length=5)
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=8, stop_token_ids=[stop], ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    assert stop not in output.token_ids[:8]
    assert len(output.token_ids) >= 8


@pytest.mark.parametrize("length", [0, 5])
def test_penalties_and_bans_hold_at_every_position_of_a_window(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, length: int
) -> None:
    engine_free = make_engine(None)
    free = engine_free.generate([PROMPT], GREEDY)[0].token_ids
    asked = _awkward_wishes(list(free))
    engine_free.close()
    reference = [_penalised_greedy(target, params) for params in asked[3:]]
    engine = make_engine(draft, speculation_length=length, proposer="lookup_else_model", lookup_shortest=1)
    biased, worded, allowed, fresh, repeated = (o.token_ids for o in engine.generate([PROMPT] * 5, asked))
    assert Counter(free).most_common(1)[0][0] not in biased
    assert free[0] not in worded
    assert (free[1], free[2]) not in set(pairwise(worded))
    assert set(allowed) <= set(range(10, 40))
    assert max(Counter(fresh).values()) < max(Counter(free).values())
    assert [list(fresh), list(repeated)] == reference


def _awkward_wishes(free: list[int]) -> list[SamplingParams]:
    """Wishes that forbid what greedy decoding would write."""
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


def test_speculation_can_be_refused_and_limited_by_a_request(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, speculation_length=4)
    common = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    never, two = engine.generate(
        [PROMPT, PROMPT], [SamplingParams(**common, speculate=False), SamplingParams(**common, max_speculation=2)]
    )
    assert never.stats.proposed == 0
    assert len(two.stats.tried_per_position) == 2
    assert never.token_ids == two.token_ids


def test_a_prompt_at_the_context_limit_gets_one_token_and_longer_ones_are_refused(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_model_len=32)
    (output,) = engine.generate([list(range(40, 71))], SamplingParams(temperature=0.0, max_tokens=None))
    assert len(output.token_ids) == 1
    with pytest.raises(RequestRefused, match="a prompt of 32 tokens leaves no room"):
        engine.generate([list(range(40, 72))])
    with pytest.raises(RequestRefused, match="the prompt is empty"):
        engine.generate([[]])
    with pytest.raises(RequestRefused, match="token id 999 is not in the model's vocabulary"):
        engine.generate([[999]])
    with pytest.raises(ConfigError, match="stop_token_ids: token id 999"):
        engine.generate([[5]], SamplingParams(stop_token_ids=[999]))
    assert not engine.has_work


def test_text_that_fills_the_context_ends_by_length(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft, max_model_len=48, speculation_length=8)
    (output,) = engine.generate([PROMPT[:20]], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == 28
    assert output.finish_reason == "length"
    engine.check_integrity()


def test_bad_numbers_in_one_row_end_that_request_alone(
    continuation: list[int], target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, max_slots=3, speculation_length=2)
    for name in ("sound", "sick", "later"):
        engine.submit(Request(name, tuple(PROMPT), GREEDY))
    engine.step()
    cache = engine.core.runner.cache
    slot = next(s.slot for s in engine.core.roster.running if s.request.id == "sick")
    with torch.inference_mode():
        cache.layers[0][1][slot, :4] = torch.nan
    done = {}
    while engine.has_work:
        done.update({output.request_id: output for output in engine.step().finished})
        engine.check_integrity()
    assert done["sick"].finish_reason == "error"
    assert "not finite" in str(done["sick"].completions[0].error)
    assert list(done["sound"].token_ids) == list(done["later"].token_ids) == continuation[:30]
    # The slot that held the bad numbers serves others as before.
    again = engine.generate([PROMPT] * 3, GREEDY)
    assert all(list(output.token_ids) == continuation[:30] for output in again)


def test_bad_numbers_of_the_draft_only_end_speculation(
    continuation: list[int], draft: LanguageModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(draft, speculation_length=3)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight.mul_(torch.nan)
    (output,) = engine.generate([PROMPT], GREEDY)
    assert list(output.token_ids) == continuation[:30]
    assert output.stats.proposed == 0


def test_what_stands_behind_a_stop_is_not_counted(continuation: list[int], make_engine: MakeEngine) -> None:
    stop = continuation[2]
    engine = make_engine(proposer_object=Oracle(continuation), speculation_length=8)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    (output,) = engine.generate([PROMPT], params)
    written, stats = len(output.token_ids), output.stats
    # The first token comes with the prompt; all others were drafted, and eight were verified.
    assert (stats.proposed, stats.accepted, stats.acceptance_rate) == (8, written - 1, 1.0)
    assert stats.tried_per_position == stats.accepted_per_position == [1] * (written - 1) + [0] * (9 - written)


def test_the_head_sees_only_the_rows_that_are_judged(
    draft: LanguageModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(draft, speculation_length=3, prefill_chunk=16)
    rows: list[int] = []
    logits = engine.core.runner.logits
    monkeypatch.setattr(engine.core.runner, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
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
    assert engine._run_until_done({"odd"}, progress=False)


def test_banned_ids_are_sorted_once_for_all_prompts_of_a_request(make_engine: MakeEngine) -> None:
    roster, params = make_engine().core.roster, SamplingParams(bad_word_ids=[[7, 8], [5], [7, 8]])
    assert roster.bad_words(params) == ((5,), (7, 8))
    assert roster.bad_words(params) is roster.bad_words(params)
