"""SmartSpec as its paper has it (Liu et al. 2024): one length a step by enumeration, from a moving acceptance rate.

Kept beside `goodput`, which goes further, to compare with, and for its admission of requests by goodput.

With a confidence threshold in the draft (Algorithm 3) every row drafts `speculation_length` tokens unless the draft
grows unsure, and the plan says how many are verified. That stays exact: whether position i is proposed depends on drawn
tokens before i alone. How far a row came depends on tokens behind the cut as well, and the plan does not know it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy

from distillspec.errors import ConfigError
from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import AdmissionView
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.by_name import ControllerParts
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel

IDLE_SHARE = 0.7  # of recent steps that propose nothing, past which new texts are not read by the draft
RECENT_STEPS = 100
HORIZON_STEPS = 64  # over which reading a prompt is spread when it is weighed against decoding


def chain(alpha: float, length: int) -> float:
    """Return (1 − α^(k+1)) / (1 − α), the tokens of a step that drafts `length`, the target's own included (Eq. 4)."""
    return float(length + 1) if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


class MovingAcceptance:
    """α per trial over recent steps, of all requests and of each: accepted / (accepted + first rejections).

    Args:
        window: steps with drafted tokens that count.
        prior: α before anything was seen, worth one trial.
    """

    def __init__(self, window: int = 50, *, prior: float = 0.7) -> None:
        if window < 1 or not 0 <= prior <= 1:
            raise ConfigError(f"window={window} must be at least 1 step, and prior={prior} in [0, 1]")
        self.window, self.prior = window, prior
        self.reset()

    def reset(self) -> None:
        """Forget everything: another draft."""
        self._steps: deque[list[tuple[str, int, int]]] = deque()  # of each row: request, accepted, tried
        self._accepted, self._tried = Counter[str](), Counter[str]()  # by request, and "" for all together

    def rate(self, sequence_id: str = "") -> float:
        """α of a request, or of all (also of a request that nothing is known of)."""
        known = sequence_id if sequence_id in self._tried else ""
        return (self._accepted[known] + self.prior) / (self._tried[known] + 1)

    def observe(self, rows: Sequence[RowResult]) -> None:
        """Count a step's trials: drafted tokens whose predecessors were all accepted."""
        if trials := [(row.sequence_id, row.kept, row.tried) for row in rows if row.trials]:
            self._steps.append(trials)
            self._add(trials, 1)
        if len(self._steps) > self.window:
            self._add(self._steps.popleft(), -1)

    def _add(self, trials: Sequence[tuple[str, int, int]], sign: int) -> None:
        self._accepted[""] += sign * sum([accepted for _, accepted, _ in trials])
        self._tried[""] += sign * sum([tried for _, _, tried in trials])
        for name, accepted, tried in trials:
            self._accepted[name] += sign * accepted
            self._tried[name] += sign * tried
            if not self._tried[name]:
                del self._tried[name], self._accepted[name]


@dataclass(frozen=True)
class Choice:
    """Why a plan is what it is."""

    alpha: float
    goodputs: tuple[float, ...]  # expected tokens a second of each length from 0 on
    idle_share: float  # of recent steps that proposed nothing
    latency: LatencyModel


class SmartSpecController:
    """Algorithms 1, 2 and (with `gated`) 3.

    Args:
        speculation_length: the most tokens a row may draft.
        latency: what steps cost; a profile's.
        acceptance: of all requests by moving average; `per_request`: of each.
        gated: rows stop drafting by the draft's confidence; the length is chosen for verification alone.
        max_wait_s: a request that waited longer is let in whatever goodput says.
    """

    def __init__(
        self,
        speculation_length: int,
        latency: LatencyModel,
        *,
        acceptance: MovingAcceptance | None = None,
        per_request: bool = False,
        gated: bool = False,
        max_wait_s: float = 1.0,
    ) -> None:
        if speculation_length < 0 or not max_wait_s >= 0:
            raise ConfigError(f"speculation_length={speculation_length} and max_wait_s={max_wait_s} must be at least 0")
        self.speculation_length = speculation_length
        self.latency = latency
        self.acceptance = acceptance or MovingAcceptance()
        self.per_request = per_request
        self.gated = gated
        self.max_wait_s = max_wait_s
        self.idle_steps: deque[bool] = deque(maxlen=RECENT_STEPS)  # whether nothing was drafted

    def plan(self, view: BatchView) -> Plan:
        """Algorithm 1: the length of highest goodput by trying all.

        The time of prompts read in the same step is left out of the choice, as in `GoodputController`.
        """
        batch, gate_s = self._batch(view)
        by_length = batch.expected(batch.alike)
        goodputs = [one.tokens / (one.seconds + gate_s * (k > 0)) for k, one in enumerate(by_length)]
        verified = goodputs.index(max(goodputs))
        best = by_length[verified]
        drafted = self.speculation_length if self.gated and verified else verified
        reads = self.idle_share <= IDLE_SHARE
        rows = tuple([RowPlan.chain(row, drafted, reads, verified) for row in view.rows])
        why = Choice(self.acceptance.rate(), tuple(goodputs), self.idle_share, self.latency)
        prompts_s = self.latency.prompts_s(len(rows), view.prefill_tokens)
        return Plan(rows, best.tokens, best.seconds + prompts_s + gate_s * (verified > 0), why)

    def admit(self, view: AdmissionView) -> int:
        """Algorithm 2: the prefix of those who wait with which the batch has the highest goodput over the next steps.

        Reading prompts is paid once and spread over `HORIZON_STEPS`. Prefixes that do not fit with room for k + 1
        tokens a row are no candidates. Nobody waits for goodput longer than `max_wait_s`: the prefix reaches at least
        to the last of those.
        """
        overdue = [place + 1 for place, waiting in enumerate(view.waiting) if waiting.waited_s > self.max_wait_s]
        read = [0, *accumulate(waiting.tokens for waiting in view.waiting[: max(0, view.slots - len(view.running))])]
        goodputs = [self._goodput_over_horizon(view, count, tokens) for count, tokens in enumerate(read)]
        return max([goodputs.index(max(goodputs)), *overdue])

    def observe(self, result: StepResult) -> None:
        """Count accepted tokens, and whether the step proposed any."""
        self.acceptance.observe(result.rows)
        if any(row.limit and row.drafted_by_model for row in result.view.rows):
            self.idle_steps.append(not any(row.speculation_length for row in result.plan.rows))
        elif self.idle_steps:
            self.idle_steps.popleft()  # nobody is left whom the draft knows: in time new requests are tried again

    def draft_changed(self, change: DraftChange) -> None:
        """Forget the acceptance of an only draft that is another. Several drafts are not told apart."""
        if change.source == DRAFT:
            self.acceptance.reset()
            self.idle_steps.clear()

    @property
    def idle_share(self) -> float:
        """Share of the recent steps that proposed nothing, 0 before half of them are known."""
        return sum(self.idle_steps) / len(self.idle_steps) if 2 * len(self.idle_steps) >= RECENT_STEPS else 0.0

    def _batch(self, view: BatchView) -> tuple[ChainBatch, float]:
        """Return the batch that Algorithm 1 tries lengths for, and the seconds that drafting costs at all lengths.

        With a gate every row drafts as far as it may, whatever is verified.
        """
        shared = self.acceptance.rate()
        alphas = [self.acceptance.rate(row.sequence_id) if self.per_request else shared for row in view.rows]
        by_model = numpy.array([row.drafted_by_model for row in view.rows], dtype=bool)
        limits = numpy.array([min(self.speculation_length, row.limit) for row in view.rows], dtype=numpy.int64)
        contexts = numpy.array([row.context_tokens for row in view.rows], dtype=numpy.int64)
        survival = numpy.power.outer(alphas, numpy.arange(1, self.speculation_length + 1))
        latency = self.latency.of_draft(drafts_block=view.drafts_block)
        batch = ChainBatch(survival, limits, contexts, latency, view.prefill_tokens, by_model)
        if not self.gated:
            return batch, 0.0
        free = replace(batch, latency=replace(latency, draft=None, draft_free_s=0.0))
        return free, latency.draft_s(contexts.tolist(), limits.tolist())

    def _goodput_over_horizon(self, view: AdmissionView, admitted: int, reading: int) -> float:
        """Return the best goodput over all lengths with so many more rows, 0 if not even length 0 fits."""
        rows = len(view.running) + admitted
        context = sum(view.running) + reading
        alpha = self.acceptance.rate()
        tokens = HORIZON_STEPS * rows
        prefill_s = self.latency.prompts_s(0, reading)
        goodputs = [
            tokens * chain(alpha, k) / max(HORIZON_STEPS * self.latency.alike_s(rows, context, k) + prefill_s, 1e-9)
            for k in range(self.speculation_length + 1)
            if context + rows * (k + 1) <= view.cache_tokens
        ]
        return max(goodputs, default=0.0)


def make_smartspec(parts: ControllerParts, per_request: bool = False, max_wait_s: float = 1.0) -> SmartSpecController:
    """Follow the paper's algorithms."""
    assert parts.latency is not None, "EngineConfig and named_controller ask for costs"
    latency = parts.latency if parts.drafts_with_model else replace(parts.latency, draft=None)
    gated = latency.draft is not None and parts.settings.draft_confidence > 0
    return SmartSpecController(
        parts.speculation_length, latency, per_request=per_request, gated=gated, max_wait_s=max_wait_s
    )
