"""Answers of one side of the live comparison, and how fast they were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from distillspec.recipes.spin.idle import Idle
from distillspec.recipes.spin.sides import Side
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import RequestOutput


class SeededPrompt(NamedTuple):
    """A prompt, its domain, and the seed of its answer. With the seed every side writes the same text."""

    domain: str
    ids: tuple[int, ...]
    seed: int


@dataclass
class Answers:
    """Tokens and seconds of some answers.

    Attributes:
        tokens: of all answers.
        seconds: that passed while they were written.
        rows: tokens and seconds by domain. Those of rows that are written together are added up, each from the start
            of its prompt's reading to its end.
    """

    tokens: int = 0
    seconds: float = 0.0
    rows: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens a second of all rows together."""
        return self.tokens / self.seconds

    @property
    def by_domain(self) -> dict[str, float]:
        """Tokens a second of one row, while it answers requests of a domain."""
        return {domain: tokens / seconds for domain, (tokens, seconds) in self.rows.items()}

    def add(self, domain: str, output: RequestOutput) -> None:
        """Add a finished answer."""
        stats, count = output.stats, len(output.token_ids)
        assert stats.admitted_s is not None, "it is answered"
        assert stats.finished_s is not None
        tokens, seconds = self.rows.get(domain, (0, 0.0))
        self.rows[domain] = tokens + count, seconds + stats.finished_s - stats.admitted_s
        self.tokens += count


def answer(name: str, side: Side, prompts: Sequence[SeededPrompt], params: SamplingParams, idle: Idle) -> Answers:
    """Let a side answer prompts: one by one if its engine has one slot, else together.

    Each side is a tenant, so that its n-grams know no other side's answers. How far their chances are believed is
    learnt from all sides of an engine together.

    Args:
        idle: takes the steps.
    """
    engine, answers = side.engine, Answers()
    engine.use_controller(side.controller)
    engine.forget_prompts()
    for group in [[prompt] for prompt in prompts] if engine.slots == 1 else [prompts]:
        domains = {str(prompt.seed): prompt.domain for prompt in group}
        started = engine.clock()
        for prompt in group:
            prompt_params = replace(params, seed=prompt.seed)
            engine.submit(Request(str(prompt.seed), prompt.ids, prompt_params, tenant=name, domain=prompt.domain))
        while engine.has_work:
            output = engine.step()
            idle.add(output.result)
            for done in output.finished:
                answers.add(domains[done.request_id], done)
        answers.seconds += engine.clock() - started
    return answers
