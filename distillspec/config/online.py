"""Settings of online adaptation: the log of the traffic, the trainer, and the gate for new versions.

Those that `removed.FIXED` names are for Python alone.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

from distillspec.config.checks import one_of, require


@dataclass
class OnlineConfig:
    """Learning from the traffic."""

    mode: str = "off"  # off | on (the server starts a trainer) | decoupled (a trainer is started elsewhere)
    folder: str = "online"  # holds log, versions, the trainer's state and costs of steps; kept between runs
    metrics_s: float = 10.0  # seconds between lines of metrics.jsonl
    keep_versions: int | None = 20  # number of the newest drafts out of service whose folders stay; null: all

    def __post_init__(self) -> None:
        one_of("online.mode", self.mode, ("off", "on", "decoupled"))
        require(bool(self.folder), "online.folder is empty; name a folder for the log and the draft's versions")
        require(self.metrics_s > 0, f"online.metrics_s={self.metrics_s} must be above 0")
        keep = self.keep_versions
        require(keep is None or keep >= 0, f"online.keep_versions={keep} must be at least 0, or null")


@dataclass
class ReplayConfig:
    """The log of the target's signal on live traffic. It holds text, as token ids."""

    share: float = 0.1  # share of the requests that is logged while nothing waits for text. Else all are
    entries: int = 64  # log-probabilities kept per token
    # The target's states, for drafts that read some, so that learning needs no pass of it: auto (fp8 on CPUs, off on
    # GPUs) | off | fp8 | bf16
    states: str = "auto"
    max_mib: float = 512.0  # size of the shards on disk
    keep: str = "reservoir"  # what stays when it is full: reservoir (a uniform sample of all time) | fifo (the newest)
    fresh_share: float = 0.5  # reservoir: share of max_mib for the newest shards
    retention_days: float = 30.0
    shard_positions: int = 4096  # tokens a shard
    flush_s: float = 5.0  # seconds after which a shard is written, full or not
    max_waiting: int = 65536  # tokens that may wait in memory; others are dropped and counted
    tenant_share: float = 0.5  # once the log is full: the largest share of recent requests for one of several tenants
    exclude_tenants: list[str] = field(default_factory=list)  # tenants that are never logged
    redaction: str | None = None  # MODULE:FUNCTION that cuts an answer before it is written

    def __post_init__(self) -> None:
        require(
            self.redaction is None or self.redaction.count(":") == 1,
            f"replay.redaction={self.redaction} must be MODULE:FUNCTION, as in replay.redaction=mine:redact",
        )
        one_of("replay.keep", self.keep, ("reservoir", "fifo"))
        one_of("replay.states", self.states, ("auto", "off", "fp8", "bf16"))
        require(0 <= self.share <= 1, f"replay.share={self.share} must be in [0, 1]")
        for name in ("fresh_share", "tenant_share"):
            value = getattr(self, name)
            require(0 < value <= 1, f"replay.{name}={value} must be in (0, 1]")
        for name in ("max_mib", "retention_days", "flush_s"):
            require(getattr(self, name) > 0, f"replay.{name}={getattr(self, name)} must be above 0")
        for name in ("shard_positions", "max_waiting"):
            require(getattr(self, name) >= 1, f"replay.{name}={getattr(self, name)} must be at least 1")
        require(1 <= self.entries <= 256, f"replay.entries={self.entries} must be in 1..256")

    def state_precision(self, device: str) -> str | None:
        """Return the precision to log the target's states in, by its device's type. None: they are not logged."""
        if self.states == "auto":
            return "fp8" if device == "cpu" else None
        return None if self.states == "off" else self.states


@dataclass
class AdaptConfig:
    """The online trainer: its triggers, its text, its share of the machine."""

    every_requests: int | None = 32  # new logged requests that start an update; null: no such trigger
    every_s: float | None = None  # seconds after which an update starts; null: no such trigger
    on_drift: bool = True  # start an update when acceptance falls
    drift_drop: float = 0.05  # fall of the short average of acceptance below the long one
    drift_by: str = "domain"  # averages by domain | tenant
    min_requests: int = 16  # the fewest new requests for an update
    busy_share: float = 0.1  # least share of the time for the trainer, beside requests if need be; 1: never stopped
    mode: str = "replay"  # replay (new and old requests) | flush (OSD: new requests once)
    # Tokens to train on: all | rejected | weighted (accepted ones less) | verified (all, and what the target gave
    # behind drafted tokens that it did not accept, which the server then logs: 112 bytes each)
    positions: str = "all"
    accepted_weight: float = 0.2  # weighted: weight of accepted tokens
    replay_share: float = 0.3  # share of an update's tokens from older requests
    offline_share: float = 0.0  # share of an update's tokens from the offline set
    offline: str | None = None  # folder or run of distill generate: text against forgetting
    tenant_share: float = 0.5  # the largest weight of one of several tenants in an update
    specialist_below: float | None = 0.8  # of several drafts: a domain below this share of the acceptance gets its own
    # Ids that a truncated draft may keep: an update adds those that its text needs, and above this number the least
    # needed go. null: none comes or goes
    vocabulary: int | None = 4096
    epochs: int = 2  # passes over the text of an update
    max_steps: int = 200  # of an update
    learning_rate: float = 1.0e-3
    batch_tokens: int = 768
    row_tokens: int = 768
    clip_norm: float = 1.0
    max_bad_steps: int = 5  # steps with NaN or infinite values that end an update
    max_bad_updates: int = 3  # failed updates in a row that stop the trainer
    # Priority of the trainer that the server starts, 0 to 19 (lowest). On Linux busy_share holds it back
    niceness: int = 0 if sys.platform == "linux" else 10
    # Of the trainer. null: all cores (at most 8) where busy_share stops it beside requests, else 1
    threads: int | None = None
    device: str = "cpu"
    gpu_memory_share: float | None = None  # CUDA: the largest share of the device's memory

    def __post_init__(self) -> None:
        one_of("adapt.mode", self.mode, ("replay", "flush"))
        one_of("adapt.positions", self.positions, ("all", "rejected", "weighted", "verified"))
        one_of("adapt.drift_by", self.drift_by, ("domain", "tenant"))
        for name in ("every_requests", "every_s", "vocabulary"):
            value = getattr(self, name)
            require(value is None or value > 0, f"adapt.{name}={value} must be above 0, or null")
        for name in ("min_requests", "epochs", "max_steps", "max_bad_steps", "max_bad_updates"):
            require(getattr(self, name) >= 1, f"adapt.{name}={getattr(self, name)} must be at least 1")
        require(self.threads is None or self.threads >= 1, f"adapt.threads={self.threads} must be at least 1, or null")
        require(self.accepted_weight >= 0, f"adapt.accepted_weight={self.accepted_weight} must be at least 0")
        for name in ("learning_rate", "clip_norm", "drift_drop"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"adapt.{name}={value} must be above 0 and finite")
        for name in ("replay_share", "offline_share"):
            value = getattr(self, name)
            require(0 <= value < 1, f"adapt.{name}={value} must be in [0, 1)")
        require(0 <= self.busy_share <= 1, f"adapt.busy_share={self.busy_share} must be in [0, 1]")
        require(
            self.replay_share + self.offline_share < 1,
            f"adapt.replay_share={self.replay_share} and offline_share={self.offline_share} leave nothing to new text",
        )
        require(
            self.offline_share == 0 or self.offline is not None,
            f"adapt.offline_share={self.offline_share} needs adapt.offline=FOLDER",
        )
        require(0 < self.tenant_share <= 1, f"adapt.tenant_share={self.tenant_share} must be in (0, 1]")
        below = self.specialist_below
        require(below is None or 0 < below <= 1, f"adapt.specialist_below={below} must be in (0, 1], or null for none")
        require(self.row_tokens >= 2, f"adapt.row_tokens={self.row_tokens} must be at least 2")
        require(
            self.batch_tokens >= self.row_tokens,
            f"adapt.batch_tokens={self.batch_tokens} is below adapt.row_tokens={self.row_tokens}; a row would not fit",
        )
        require(0 <= self.niceness <= 19, f"adapt.niceness={self.niceness} must be in 0..19")
        share = self.gpu_memory_share
        require(share is None or 0 < share <= 1, f"adapt.gpu_memory_share={share} must be in (0, 1], or null")


@dataclass
class GateConfig:
    """The gate: tests of a new version before it serves, and its rollback."""

    evidence: str = "log"  # log (what it holds of the target) | target (which reads the answers again)
    requests: int = 120  # conversations by which a version that is not clearly better is inconclusive
    min_requests: int = 24  # the fewest for a verdict
    margin: float = 0.01  # relative gain in expected goodput that the interval's lower end must exceed
    domain_requests: int = 8  # the fewest conversations for a verdict on a domain or a tenant
    speculation_length: int = 4  # longest speculation length considered
    rollback_requests: int = 32  # requests before a version is suspected; conversations that clear one
    window: int = 400  # newest finished requests of a version in its interval
    collapse: float = 0.5  # share of the acceptance before; below it there is an alarm, and four requests are enough
    bootstrap_samples: int = 1000

    def __post_init__(self) -> None:
        for name in ("requests", "min_requests", "domain_requests", "speculation_length", "rollback_requests"):
            require(getattr(self, name) >= 1, f"gate.{name}={getattr(self, name)} must be at least 1")
        one_of("gate.evidence", self.evidence, ("log", "target"))
        require(
            self.min_requests <= self.requests,
            f"gate.min_requests={self.min_requests} is above gate.requests={self.requests}",
        )
        require(self.margin >= 0, f"gate.margin={self.margin} must be at least 0")
        require(0 <= self.collapse < 1, f"gate.collapse={self.collapse} must be in [0, 1)")
        require(self.window >= self.rollback_requests, f"gate.window={self.window} is below gate.rollback_requests")
        require(self.bootstrap_samples >= 100, f"gate.bootstrap_samples={self.bootstrap_samples} must be at least 100")
