"""A machine of known costs, for controllers."""

from __future__ import annotations

from collections.abc import Callable

import numpy

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

CPU = LatencyModel(CostTable.line(1e-6, 1.5e-3, 4e-2), CostTable.line(1e-7, 2e-4, 5e-3))


class Machine:
    """Steps with known costs and acceptance.

    Args:
        latency: costs of steps.
        alpha: acceptance rate of every drafted token.
        rows: decoding rows of every step.
        seed: of acceptance and noise.
        catches_up: rows that were not drafted for need catch-up prefill before they are again.
        pauses: by step, the factor by which it takes longer.
        prompts: by step, prompt tokens read beside the rows.
    """

    def __init__(
        self,
        latency: LatencyModel,
        alpha: float,
        rows: int = 4,
        seed: int = 0,
        *,
        catches_up: bool = False,
        pauses: dict[int, float] | None = None,
        prompts: Callable[[int], int] = lambda step: 0,
    ) -> None:
        self.latency, self.alpha, self.rows, self.pauses = latency, alpha, rows, pauses or {}
        self.generator = numpy.random.default_rng(seed)
        self.unread_tokens = [1] * rows
        self.catches_up, self.prompts = catches_up, prompts
        self.lengths: list[list[int]] = []  # of all steps

    def run(self, controller: LengthController, steps: int) -> float:
        """Return the tokens a second over the steps, without the time of prompts."""
        tokens, seconds = 0, 0.0
        for step in range(steps):
            contexts = [100 + (step + 37 * row) % 400 for row in range(self.rows)]
            views = enumerate(zip(contexts, self.unread_tokens, strict=True))
            rows_seen = tuple(RowView(f"r{row}", c, 8, unread_tokens=tokens) for row, (c, tokens) in views)
            view = BatchView(rows_seen, self.prompts(step))
            plan = controller.plan(view)
            assert step % 40 or plan == controller.plan(view)  # pure
            lengths = [row.speculation_length for row in plan.rows]
            self.lengths.append(lengths)
            accepted = [int((self.generator.random(k) < self.alpha).cumprod().sum()) for k in lengths]
            noise = float(self.generator.normal(1, 0.03)) * self.pauses.get(step, 1.0)
            unread = [tokens for tokens, k in zip(self.unread_tokens, lengths, strict=True) if k]
            draft_s = noise * (self.latency.draft_s(contexts, lengths) + self.latency.catch_up_s(unread))
            if self.catches_up:
                rows_done = zip(self.unread_tokens, lengths, accepted, strict=True)
                self.unread_tokens = [1 if k else unread + count + 1 for unread, k, count in rows_done]
            prompts_s = noise * self.latency.prompts_s(self.rows, view.prefill_tokens)
            target_s = noise * self.latency.target_s(contexts, lengths, view.prefill_tokens) - prompts_s
            outcomes = enumerate(zip(lengths, accepted, strict=True))
            rows = tuple(RowResult.chain(f"r{i}", k, count, count + 1) for i, (k, count) in outcomes)
            times = (draft_s, target_s + prompts_s, draft_s + target_s + prompts_s)
            controller.observe(StepResult(rows, view, plan, view.prefill_tokens, *times))
            tokens += sum(row.emitted for row in rows)
            seconds += draft_s + target_s
        return tokens / seconds
