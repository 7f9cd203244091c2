"""Random lives: whatever is submitted, aborted, preempted and swapped, no slot leaks and everyone gets a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.proposers.prompt_lookup import PromptLookup


class EngineLife(RuleBasedStateMachine):
    """Commands in any order against an engine with few slots and less cache than they hold."""

    target: LanguageModel
    draft: LanguageModel

    def __init__(self) -> None:
        super().__init__()
        settings_ = EngineSettings(
            max_slots=3, max_model_len=48, max_cache_tokens=90, prefill_chunk=9, speculation_length=3
        )
        self.engine = Engine(self.target, self.draft, settings_)
        self.asked: dict[str, Request] = {}
        self.reasons: dict[str, str] = {}

    @rule(
        length=st.integers(1, 40),
        most=st.integers(1, 12),
        priority=st.integers(0, 2),
        n=st.integers(1, 2),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.sampled_from([None, 1]),
    )
    def submit(self, length: int, most: int, priority: int, n: int, temperature: float, seed: int | None) -> None:
        name = f"r{len(self.asked)}"
        params = SamplingParams(temperature=temperature, max_tokens=most, n=n, seed=seed)
        self.asked[name] = Request(name, tuple(3 + (i * 7 + length) % 200 for i in range(length)), params, priority)
        self.engine.submit(self.asked[name])

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        self.engine.abort(f"r{pick}")

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step().finished:
                assert output.request_id not in self.reasons, "finished twice"
                self.reasons[output.request_id] = output.finish_reason
                assert len(output.completions) == self.asked[output.request_id].params.n

    @rule(kind=st.sampled_from(["draft", "lookup", "none"]))
    def swap(self, kind: str) -> None:
        engine = self.engine
        proposers: dict[str, Any] = {
            "draft": lambda: engine._make_proposer(self.draft, "again"),
            "lookup": PromptLookup,
            "none": lambda: None,
        }
        engine.core.at_next_step(lambda: engine.core.replace_proposer(proposers[kind]()))

    @invariant()
    def nothing_leaks(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
            self.engine.check_integrity()
        self.engine.close()
        assert set(self.reasons) == set(self.asked), "a request never finished"
        assert set(self.reasons.values()) <= {"stop", "length", "abort"}
        assert self.engine.core.roster.pool.owners == []


@pytest.mark.parametrize("examples", [25])
def test_any_life_of_the_engine(target: LanguageModel, examples: int) -> None:
    EngineLife.target = target
    EngineLife.draft = initialise_draft(DraftConfig(layers=1), target)
    run_state_machine_as_test(
        EngineLife,
        settings=settings(
            max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
