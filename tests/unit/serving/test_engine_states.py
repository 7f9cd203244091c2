"""Random lives: whatever is submitted, aborted, preempted and swapped, no slot leaks and everyone gets a reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, RequestOutput, SamplingParams
from distillspec.serving.proposers.prompt_lookup import PromptLookup

STOPS = tuple(range(20, 60))  # one id in seven, so that some requests meet one
PARAMS_BY_NAME: dict[str, dict[str, Any]] = {
    "free": {},
    "stops": {"stop_token_ids": STOPS},
    "allowed": {"allowed_token_ids": range(50, 90), "stop_token_ids": STOPS},
    "banned": {"bad_word_ids": [[token] for token in range(0, 260, 2)]},
}


class EngineLife(RuleBasedStateMachine):
    """Commands in any order against an engine with few slots and less cache than they hold."""

    target: LanguageModel
    draft: LanguageModel
    page_tokens: int
    happened: Counter[str]  # over all lives of a run

    def __init__(self) -> None:
        super().__init__()
        settings_ = EngineSettings(
            max_slots=3,
            max_model_len=48,
            max_cache_tokens=90,
            prefill_chunk=9,
            controller="fixed",
            speculation_length=3,
            page_tokens=self.page_tokens,
        )
        self.engine = Engine(self.target, self.draft, settings_)
        self.now = 0.0
        self.engine.clock = lambda: self.now
        self.asked: dict[str, Request] = {}
        self.unwanted: set[str] = set()
        self.reasons: dict[str, str] = {}

    @rule(
        length=st.integers(1, 40),
        most=st.integers(1, 12),
        priority=st.integers(0, 2),
        n=st.integers(1, 2),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.sampled_from([None, 1]),
        options=st.sampled_from(list(PARAMS_BY_NAME)),
        deadline_s=st.sampled_from([None, None, 0.0, 3.0]),
    )
    def submit(
        self,
        length: int,
        most: int,
        priority: int,
        n: int,
        temperature: float,
        seed: int | None,
        options: str,
        deadline_s: float | None,
    ) -> None:
        name = f"r{len(self.asked)}"
        params = SamplingParams(temperature=temperature, max_tokens=most, n=n, seed=seed, **PARAMS_BY_NAME[options])
        prompt = tuple(3 + (i * 7 + length // 8) % 200 for i in range(length))  # some begin alike
        self.asked[name] = Request(name, prompt, params, priority, deadline_s)
        self.engine.submit(self.asked[name])

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        name = f"r{pick % (len(self.asked) + 1)}"  # the last one is not known
        self.unwanted.add(name)
        self.engine.abort(name)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            drafted_by = self.engine.proposer
            output = self.engine.step()
            self.happened["swap"] += self.engine.proposer is not drafted_by and bool(output.deltas)
            for finished in output.finished:
                assert finished.request_id not in self.reasons, "finished twice"
                self.reasons[finished.request_id] = finished.finish_reason
                self._check(finished)

    def _check(self, finished: RequestOutput) -> None:
        """Every answer's reason is true, and it wrote only what it may."""
        request = self.asked[finished.request_id]
        params = request.params
        assert len(finished.completions) == params.n
        for answer in finished.completions:
            self.happened["preempt"] += answer.stats.preemptions
            self.happened[answer.finish_reason] += 1
            if answer.finish_reason == "stop":
                stops = {*self.target.stop_ids, *params.stop_token_ids}
                assert stops.isdisjoint(answer.token_ids[:-1])
                assert answer.token_ids[-1] == answer.stop_reason in stops
            elif answer.finish_reason == "length":
                assert len(answer.token_ids) in (params.max_tokens, 48 - len(request.prompt_ids))
            else:
                expired = request.deadline_s is not None and answer.stats.submitted_s + request.deadline_s < self.now
                assert request.id in self.unwanted or expired
                self.happened["deadline"] += expired and request.id not in self.unwanted
                self.happened["unwanted"] += not expired
            if params.allowed_token_ids is not None:
                assert set(answer.token_ids) <= set(params.allowed_token_ids)
            assert {token for (token,) in params.bad_word_ids}.isdisjoint(answer.token_ids)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: bool(self.engine.sequences.running))
    @rule(pick=st.integers(0, 2))
    def preempt(self, pick: int) -> None:
        self.engine.at_next_step(lambda: self._take_slot(pick))

    def _take_slot(self, pick: int) -> None:
        sequences = self.engine.sequences
        if sequences.running:
            sequences.preempt(sequences.running[pick % len(sequences.running)])
            self.happened["forced"] += 1

    @rule(kind=st.sampled_from(["draft", "lookup", "none"]))
    def swap(self, kind: str) -> None:
        if kind == "draft":
            self.engine.use_draft(self.draft, "again")
        else:
            self.engine.use_proposer(PromptLookup() if kind == "lookup" else None)

    @invariant()
    def nothing_leaks(self) -> None:
        self.engine.check_integrity()
        pool = self.engine.sequences.pool
        self.happened["shared"] += sum(pool.reserved.values()) > pool.token_budget

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
            self.engine.check_integrity()
        self.engine.close()
        assert set(self.reasons) == set(self.asked), "a request never finished"
        assert not self.engine.sequences.pool.owners


@pytest.mark.parametrize(("page_tokens", "examples"), [(0, 50), (4, 50)], ids=["slots", "pages"])
def test_any_life_of_the_engine(target: LanguageModel, page_tokens: int, examples: int) -> None:
    EngineLife.target, EngineLife.page_tokens = target, page_tokens
    EngineLife.draft = initialise_draft(DraftConfig(layers=1), target)
    EngineLife.happened = Counter()
    run_state_machine_as_test(
        EngineLife,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    happened = EngineLife.happened
    assert happened.keys() <= {"stop", "length", "abort", "deadline", "unwanted", "preempt", "forced", "swap", "shared"}
    assert all(happened[event] > 0 for event in ("stop", "length", "deadline", "unwanted", "forced", "swap")), happened
    assert happened["preempt"] > happened["forced"], "the scheduler preempted too"
    assert (happened["shared"] > 0) == (page_tokens > 0), "with pages, more is reserved than fits without sharing"
