"""Decision on a candidate from two drafts' scores, with its reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from distillspec.config import GateConfig
from distillspec.evaluation.bootstrap import interval, relative_gain
from distillspec.models import LanguageModel
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.online.gate.shadow import Score
from distillspec.types import Interval

Decision = Literal["promoted", "inconclusive", "refused"]


@dataclass(frozen=True)
class Costs:
    """Cost of a step at length γ, in plain steps of the target: 1, γ · `verify`, and γ tokens of the draft.

    further: of each drafted token behind the first, None: as the first. A block's further tokens cost less.
    """

    draft: float
    verify: float
    further: float | None = None

    def of(self, gamma: int) -> float:
        further = self.draft if self.further is None else self.further
        return self.draft + (gamma - 1) * further + 1 + gamma * self.verify


@dataclass(frozen=True)
class GateDecision:
    """Verdict on a candidate with its figures. Gains are relative to the draft in service."""

    candidate: str
    incumbent: str
    decision: Decision
    reason: str
    requests: int = 0
    gain: Interval | None = None  # in expected goodput, paired by request
    goodput: tuple[float, float] | None = None  # before and after, plain decoding is 1
    gamma: tuple[int, int] | None = None  # lengths of these
    alpha: tuple[Interval, Interval] | None = None  # before and after
    domains: dict[str, float] = field(default_factory=dict)  # gain by domain
    offline_gain: float | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Two drafts on the same answers, each at its own best length.

    Length 0 is left out: if neither draft is worth its cost yet, the better one must still be promoted, or no draft
    would ever become worth it.
    """

    before: Sequence[Score]
    after: Sequence[Score]
    costs: Costs

    @property
    def gamma(self) -> tuple[int, int]:
        return self._best(self.before), self._best(self.after)

    @property
    def goodput(self) -> tuple[float, float]:
        first, second = self.gamma
        return self._goodput(self.before, first), self._goodput(self.after, second)

    def gain(self, samples: int, seed: int) -> Interval:
        first, second = self.gamma
        return relative_gain(self._parts(self.before, first), self._parts(self.after, second), samples, seed)

    def gain_of(self, domain: str) -> float:
        """Return the mean gain on one domain, at the lengths chosen for all."""
        first, second = self.gamma
        pairs = [(b, a) for b, a in zip(self.before, self.after, strict=True) if b.domain == domain]
        before, after = ([pair[side] for pair in pairs] for side in (0, 1))
        return self._goodput(after, second) / self._goodput(before, first) - 1

    def _best(self, scores: Sequence[Score]) -> int:
        return max(range(1, len(scores[0].tokens) + 1), key=lambda gamma: self._goodput(scores, gamma))

    def _goodput(self, scores: Sequence[Score], gamma: int) -> float:
        tokens, cost = self._parts(scores, gamma)
        return sum(tokens) / sum(cost)

    def _parts(self, scores: Sequence[Score], gamma: int) -> tuple[list[float], list[float]]:
        """Return expected tokens and cost of each answer."""
        tokens = [score.tokens[gamma - 1] for score in scores]
        return tokens, [score.blocks[gamma - 1] * self.costs.of(gamma) for score in scores]


def decide(
    candidate: str,
    incumbent: str,
    online: Comparison,
    offline: Comparison | None,
    config: GateConfig,
    seed: int = 0,
) -> GateDecision:
    """Promote if the gain's lower bound exceeds the margin, and no domain nor the offline set loses too much."""
    gain = online.gain(config.bootstrap_samples, seed)
    counts: dict[str, int] = {}
    for score in online.before:
        counts[score.domain] = counts.get(score.domain, 0) + 1
    domains = {d: online.gain_of(d) for d, count in sorted(counts.items()) if count >= config.domain_requests}
    offline_gain = None if offline is None else offline.goodput[1] / offline.goodput[0] - 1
    decision, reason = _decision(gain, domains, offline_gain, config)
    return GateDecision(
        candidate,
        incumbent,
        decision,
        reason,
        requests=len(online.before),
        gain=gain,
        goodput=online.goodput,
        gamma=online.gamma,
        alpha=(_alpha(online.before, config, seed), _alpha(online.after, config, seed)),
        domains=domains,
        offline_gain=offline_gain,
    )


def _decision(
    gain: Interval, domains: dict[str, float], offline_gain: float | None, config: GateConfig
) -> tuple[Decision, str]:
    shown = f"gain {gain.mean:+.1%} ({gain.low:+.1%} … {gain.high:+.1%})"
    worst = min(domains, key=lambda domain: domains[domain], default=None)
    if gain.high < 0:
        return "refused", f"{shown}: worse than the draft in service"
    if worst is not None and domains[worst] < -config.max_domain_loss:
        return "refused", f"{shown}, but {domains[worst]:+.1%} on {worst}"
    if offline_gain is not None and offline_gain < -config.max_domain_loss:
        return "refused", f"{shown}, but {offline_gain:+.1%} on the offline set"
    if gain.low > config.margin:
        return "promoted", shown
    return "inconclusive", f"{shown}: the lower end does not exceed {config.margin:.1%}"


def estimate_costs(target: LanguageModel, draft: LanguageModel, latency: LatencyModel | None = None) -> Costs:
    """Estimate costs from measured step times if they are known, otherwise from the weights that a token reads."""
    if latency is not None and latency.draft is not None:
        plain, latency = latency.target_s([CONTEXT], [0]), latency.of_draft(draft.drafts_at_once)
        if plain > 0:
            verify = (latency.target_s([CONTEXT], [1]) - plain) / plain
            first, second = (latency.draft_s([CONTEXT], [length]) / plain for length in (1, 2))
            return Costs(first, verify, second - first)
    read = _weights_read(target)
    further = draft.head.weight.numel() / read if draft.drafts_at_once else None
    return Costs(_weights_read(draft) / read, VERIFY_COST, further)


CONTEXT = 256  # tokens of a typical request
VERIFY_COST = 0.05  # of each further verified token, in target steps: an assumption, where no engine has measured it


def _weights_read(model: LanguageModel) -> int:
    """Count the parameters that one token reads: all but the input embeddings, of which it reads one row."""
    head = model.head.weight.numel()
    embeddings = model.model.get_input_embeddings().weight
    outputs = model.model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.model.parameters()) - embeddings.numel()
    return body + (0 if outputs is not embeddings else head)


def _alpha(scores: Sequence[Score], config: GateConfig, seed: int) -> Interval:
    sums, positions = [s.alpha for s in scores], [s.positions for s in scores]
    return interval(sums, positions, config.bootstrap_samples, seed)
