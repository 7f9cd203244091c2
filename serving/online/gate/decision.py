"""Decision on a version from the evidence on it and on another one, with its reason. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal

from distillspec.config import GateConfig
from distillspec.serving.online.judging.confidence import confidence_sequence, plausible_lower_end, spent
from distillspec.serving.online.judging.evidence import Evidence
from distillspec.types import Interval

Decision = Literal["promoted", "inconclusive", "refused"]

DOMAIN, TENANT = attrgetter("domain"), attrgetter("tenant")  # of a pair
ERROR = 0.05  # probability of any false promotion between two true ones
ROLLBACK_ERROR = 0.02  # probability that a version as good as its predecessor is ever rolled back, by all suspicions


@dataclass(frozen=True)
class GateDecision:
    """Verdict on a candidate with its figures. Gains are relative to the draft in service."""

    candidate: str
    incumbent: str
    decision: Decision
    reason: str
    requests: int = 0  # conversations that it rests on
    gain: Interval | None = None  # in expected goodput, paired by conversation
    goodput: tuple[float, float] | None = None  # before and after, plain decoding is 1
    gamma: tuple[int, int] | None = None  # lengths of these
    alpha: tuple[float, float] | None = None  # before and after
    domains: dict[str, float] = field(default_factory=dict)  # gain by domain
    pool: Interval | None = None  # gain of the whole pool, for a draft that is to join it

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def acceptance_ratio(self) -> float:
        """Return the candidate's acceptance over the incumbent's, 1 where it is not known."""
        return self.alpha[1] / self.alpha[0] if self.alpha is not None and self.alpha[0] > 0 else 1.0


def decide(
    candidate: str, incumbent: str, evidence: Evidence, config: GateConfig, number: int, *, final: bool = False
) -> GateDecision | None:
    """Decide on a candidate, None: more evidence is needed.

    It is promoted if the whole interval of its gain is above the margin, and no domain or tenant has one below 0. If
    that is not to be expected by `config.requests` conversations, it is given up: learning waits for the verdict.

    Args:
        number: of this candidate among those since the last promotion, from 1 on. Each spends a part of the error.
        final: there will be no more evidence.
    """
    requests = len(evidence.pairs)
    if requests < config.min_requests:
        return None
    error = spent(ERROR, number)
    gains = evidence.gains().tolist()
    gain = confidence_sequence(gains, error)
    shown = f"gain {gain.mean:+.1%} ({gain.low:+.1%} … {gain.high:+.1%})"
    losers = _losers(evidence, config, error)
    full = final or requests >= config.requests
    if gain.high < 0:
        decision, reason = "refused", f"{shown}: worse than the draft in service"
    elif losers and (gain.low > config.margin or full):
        decision, reason = "refused", f"{shown}, but {losers}"
    elif gain.low > config.margin:
        decision, reason = "promoted", shown
    elif gain.high < config.margin:
        decision, reason = "inconclusive", f"{shown}: it does not reach {config.margin:.1%}"
    elif full:
        decision, reason = "inconclusive", f"{shown}: the lower end does not exceed {config.margin:.1%}"
    elif plausible_lower_end(gains, error, config.requests) < config.margin:
        decision, reason = "inconclusive", f"{shown}: {config.requests} conversations would hardly show a gain"
    else:
        return None
    domains = evidence.groups(DOMAIN, config.domain_requests)
    return GateDecision(
        candidate,
        incumbent,
        decision,  # type: ignore[arg-type]
        reason,
        requests=requests,
        gain=gain,
        goodput=evidence.goodput,
        gamma=evidence.lengths,
        alpha=evidence.alpha,
        domains={name: domain_evidence.gain(error).mean for name, domain_evidence in domains.items()},
    )


def is_worse(evidence: Evidence, config: GateConfig, number: int = 1) -> bool:
    """Return True if the first draft is clearly better than the second, whoever's text is left out.

    With several tenants the finding must hold without each of them: one tenant's text rolls nothing back.

    Args:
        number: of the suspicion among those of the second draft, from 1 on. Each spends a part of the error.
    """
    if len(evidence.pairs) < config.min_requests:
        return False
    tenants = {pair.tenant for pair in evidence.pairs}
    views = [evidence, *(evidence.without(tenant) for tenant in (tenants if len(tenants) > 1 else ()))]
    error = spent(ROLLBACK_ERROR, number)
    return all(len(view.pairs) > 1 and view.gain(error).high < 0 for view in views)


def _losers(evidence: Evidence, config: GateConfig, error: float) -> str:
    """Name the domains whose interval is below 0, and say if a tenant's is. An empty text without any.

    A tenant's name would stay in the registry after its answers were deleted.
    """
    losers = []
    for name in (DOMAIN, TENANT):
        parts = evidence.groups(name, config.domain_requests)
        if len(parts) < 2:
            continue
        for key, part in parts.items():
            gain = part.gain(error / len(parts))
            if gain.high < 0:
                losers.append(f"{gain.mean:+.1%} on {key if name is DOMAIN else 'a tenant'}")
    return ", ".join(losers)
