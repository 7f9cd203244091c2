"""Measured losses: tokens a second that rows got, against those of the best draft alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from distillspec.serving.base.plans import StepResult
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.rewards import ALL, Reward, Rewards, passes_s


@dataclass
class Shared:
    """Rows of a step that have the same draft."""

    rows: int = 0
    usual: int = 0  # of them, those that are not on trial
    tokens: float = 0.0  # written
    nodes: int = 0  # drafted


class LossMeter:
    """Counts what the choices of steps have cost, by the tokens a second of each draft for all rows of a step.

    Drafts of one step share the target's pass and wait for one another. So a draft's rows are rewarded as if all rows
    had it: the measured seconds are scaled by the cost of as many rows like them. All drafts must have had similar
    requests, as drawn ones have.

    Args:
        latency: the present costs of steps.
    """

    def __init__(self, latency: Callable[[], LatencyModel]) -> None:
        self.losses = Losses(0.0, 0.0)
        self._latency = latency
        self._alone = Rewards()

    def count(self, result: StepResult, rewards: Sequence[Reward], on_trial: Collection[str]) -> None:
        """Add what a step has cost. Rows without a draft are left out: they only lack a place.

        Rows on trial have cost a step all that it would not have cost if its other rows had been alone.

        Args:
            rewards: of the step.
        """
        if not rewards:
            return
        by_draft = _shared(rewards, on_trial)
        alone_s = self._alone_s(result, by_draft)
        for source, shared in by_draft.items():
            self._alone.add((ALL, source), shared.tokens, shared.rows * alone_s[source])
        rates = self._alone.rates(ALL)
        best, whole_s = max(rates.values()), result.target_s + result.readings_s + passes_s(result, by_draft)
        regret = others = 0.0
        for source, shared in by_draft.items():
            regret += shared.rows * (best * whole_s - rates[source] * alone_s[source])
            others += shared.usual * (best - rates[source]) * alone_s[source]
        tried = any(shared.usual < shared.rows for shared in by_draft.values())
        self.losses.add(max(0.0, regret - others) if tried else 0.0, max(0.0, regret))

    def forget(self, source: str) -> None:
        """Forget what is known of a draft."""
        self._alone.forget(source)

    def _alone_s(self, result: StepResult, by_draft: Mapping[str, Shared]) -> dict[str, float]:
        """Return by draft the seconds of the step if all these rows had that draft, and as many drafted tokens each."""
        latency, context = self._latency(), sum([row.context_tokens for row in result.view.rows])
        rows = sum([shared.rows for shared in by_draft.values()])
        tokens = len(result.rows) + sum([row.nodes for row in result.rows]) + result.prefill_tokens
        others = tokens - sum([shared.nodes for shared in by_draft.values()])  # all but drafted ones
        pass_s, alone_s = latency.target.seconds(context, tokens, rows), dict[str, float]()
        for source, shared in by_draft.items():
            times = latency.target.seconds(context, others + rows * shared.nodes / shared.rows, rows) / pass_s
            drafting_s = passes_s(result, [source]) * _times(latency, source, rows, shared.rows)
            alone_s[source] = result.target_s * times + drafting_s
        return alone_s


def _shared(rewards: Sequence[Reward], on_trial: Collection[str]) -> dict[str, Shared]:
    by_draft = dict[str, Shared]()
    for row, source, tokens, _, nodes in rewards:
        shared = by_draft.setdefault(source, Shared())
        shared.rows += 1
        shared.usual += row not in on_trial
        shared.tokens += tokens
        shared.nodes += nodes
    return by_draft


def _times(latency: LatencyModel, source: str, rows: int, count: int) -> float:
    """Return how many times as long a draft's pass takes for all rows as for some, 1 where that is not known.

    A learnt table may say 0 seconds of a draft whose passes are lost in the noise of the target's.
    """
    table = latency.members.get(source)
    some_s = 0.0 if table is None else table.seconds(0, count, count)
    return 1.0 if table is None or some_s <= 0 else table.seconds(0, rows, rows) / some_s
