"""Online adaptation: what is logged of the traffic, how the draft learns from it, and what lets a new version in."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, one_of, require
from distillspec.config.loss import LossConfig
from distillspec.config.models import TargetConfig
from distillspec.config.training import TrackerConfig


@dataclass
class OnlineConfig:
    """Learning from the traffic. `mode`: off | on (the server starts a trainer) | decoupled (one started elsewhere)."""

    mode: str = "off"
    folder: str = "online"  # the log, the versions and the trainer's state; kept between runs
    metrics_s: float = 10.0  # seconds between lines of metrics.jsonl
    keep_versions: int | None = 20  # drafts out of service whose folders stay, the newest; null: all

    def __post_init__(self) -> None:
        one_of("online.mode", self.mode, ("off", "on", "decoupled"))
        require(bool(self.folder), "online.folder is empty; name a folder for the log and the draft's versions")
        require(self.metrics_s > 0, f"online.metrics_s={self.metrics_s} must be above 0")
        keep = self.keep_versions
        require(keep is None or keep >= 0, f"online.keep_versions={keep} must be at least 0, or null")


@dataclass
class ReplayConfig:
    """The log of the target's signal on live traffic. It holds text as token ids: treat it so."""

    share: float = 0.1  # of the requests, chosen by their id
    held_out: float = 0.1  # of the logged requests: for the gate alone, never trained on
    entries: int = 64  # log-probabilities kept a token
    tail_samples: int = 0  # tokens drawn from the target's other tokens at each: unbiased losses, 6 bytes a draw
    max_mib: float = 512.0  # of shards on disk
    keep: str = "reservoir"  # what stays when that is full: reservoir (a fair sample of all time) | fifo (the newest)
    fresh_share: float = 0.5  # reservoir: share of the budget that the newest shards have for themselves
    retention_days: float = 30.0
    shard_positions: int = 4096  # tokens a shard
    flush_s: float = 30.0  # a shard is written after so many seconds, full or not
    max_waiting: int = 65536  # tokens that may wait in memory; more are dropped and counted
    tenant_share: float = 0.5  # once the log is full: largest share of recent requests one of several tenants may log
    exclude_tenants: list[str] = field(default_factory=list)  # never logged
    redaction: str | None = None  # MODULE:FUNCTION that sees an answer before it is written: what of it may be kept

    def __post_init__(self) -> None:
        require(
            self.redaction is None or self.redaction.count(":") == 1,
            f"replay.redaction={self.redaction} must be MODULE:FUNCTION, as in replay.redaction=mine:redact",
        )
        one_of("replay.keep", self.keep, ("reservoir", "fifo"))
        for name in ("share", "held_out"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"replay.{name}={value} must be in [0, 1]")
        for name in ("fresh_share", "tenant_share"):
            value = getattr(self, name)
            require(0 < value <= 1, f"replay.{name}={value} must be in (0, 1]")
        for name in ("max_mib", "retention_days", "flush_s"):
            require(getattr(self, name) > 0, f"replay.{name}={getattr(self, name)} must be above 0")
        for name in ("shard_positions", "max_waiting"):
            require(getattr(self, name) >= 1, f"replay.{name}={getattr(self, name)} must be at least 1")
        require(1 <= self.entries <= 256, f"replay.entries={self.entries} must be in 1..256")
        require(0 <= self.tail_samples <= 64, f"replay.tail_samples={self.tail_samples} must be in 0..64")


@dataclass
class AdaptConfig:
    """The online trainer: when it learns, from what, and how far it may use the machine."""

    every_requests: int | None = 256  # new logged requests that start an update; null: not by number
    every_s: float | None = None  # seconds that start one; null: not by time
    on_drift: bool = True  # an update as soon as acceptance falls somewhere
    drift_drop: float = 0.05  # so much, short against long average
    drift_by: str = "domain"  # whose averages: domain | tenant
    min_requests: int = 16  # fewer new requests are not worth an update
    idle_only: bool = False  # wait until the server has been idle for some seconds
    mode: str = "replay"  # replay (new and old) | flush (OSD: the new requests once, then forgotten)
    positions: str = "all"  # which tokens teach: all | rejected | weighted
    accepted_weight: float = 0.2  # weighted: of tokens that the draft had right
    replay_share: float = 0.3  # of an update's tokens, from older requests
    offline_share: float = 0.0  # of an update's tokens, from the offline set
    offline: str | None = None  # data folder or run of distill generate: against forgetting, and for the gate
    tenant_share: float = 0.5  # the most that one tenant among several may count for in an update, by weight
    anchor: float = 0.0  # weight of KL(promoted draft ‖ draft)
    lora_rank: int = 0  # 0: all weights learn; else adapters of this rank (needs peft), merged at the end
    lora_by: str = "all"  # one adapter for all text | domain: one each, merged by the domains' shares of the text
    epochs: int = 1  # passes over an update's text
    max_steps: int = 200  # of an update
    learning_rate: float = 5.0e-4
    batch_tokens: int = 768
    row_tokens: int = 768
    clip_norm: float = 1.0
    max_bad_steps: int = 5  # steps without finite numbers that end an update
    max_bad_updates: int = 3  # such updates in a row: the trainer stops, and says so
    niceness: int = 10  # of the server's own trainer; one that somebody starts has the shell's
    threads: int = 1
    device: str = "cpu"
    gpu_memory_share: float | None = None  # CUDA: the most of the device's memory

    def __post_init__(self) -> None:
        one_of("adapt.mode", self.mode, ("replay", "flush"))
        one_of("adapt.positions", self.positions, ("all", "rejected", "weighted"))
        one_of("adapt.lora_by", self.lora_by, ("all", "domain"))
        one_of("adapt.drift_by", self.drift_by, ("domain", "tenant"))
        for name in ("every_requests", "every_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"adapt.{name}={value} must be above 0, or null")
        for name in ("min_requests", "epochs", "max_steps", "max_bad_steps", "max_bad_updates", "threads"):
            require(getattr(self, name) >= 1, f"adapt.{name}={getattr(self, name)} must be at least 1")
        for name in ("accepted_weight", "anchor", "lora_rank"):
            require(getattr(self, name) >= 0, f"adapt.{name}={getattr(self, name)} must be at least 0")
        for name in ("learning_rate", "clip_norm", "drift_drop"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"adapt.{name}={value} must be above 0 and finite")
        for name in ("replay_share", "offline_share"):
            value = getattr(self, name)
            require(0 <= value < 1, f"adapt.{name}={value} must be in [0, 1)")
        require(
            self.replay_share + self.offline_share < 1,
            f"adapt.replay_share={self.replay_share} and offline_share={self.offline_share} leave nothing to new text",
        )
        require(
            self.offline_share == 0 or self.offline is not None,
            f"adapt.offline_share={self.offline_share} needs adapt.offline=FOLDER",
        )
        require(0 < self.tenant_share <= 1, f"adapt.tenant_share={self.tenant_share} must be in (0, 1]")
        require(self.row_tokens >= 2, f"adapt.row_tokens={self.row_tokens} must be at least 2")
        require(
            self.batch_tokens >= self.row_tokens,
            f"adapt.batch_tokens={self.batch_tokens} is below adapt.row_tokens={self.row_tokens}; a row would not fit",
        )
        require(0 <= self.niceness <= 19, f"adapt.niceness={self.niceness} must be in 0..19")
        share = self.gpu_memory_share
        require(share is None or 0 < share <= 1, f"adapt.gpu_memory_share={share} must be in (0, 1], or null")
        require(
            self.lora_by == "all" or self.lora_rank > 0,
            f"adapt.lora_by={self.lora_by} trains adapters; give them a rank: adapt.lora_rank=8",
        )
        require(
            self.lora_rank == 0 or importlib.util.find_spec("peft") is not None,
            f"adapt.lora_rank={self.lora_rank} needs the package peft; pip install peft, or use adapt.lora_rank=0",
        )


@dataclass
class GateConfig:
    """What a new version must show before it serves, and what sends it back."""

    requests: int = 64  # newest held-out requests it is judged on
    min_requests: int = 24  # fewer: it waits
    margin: float = 0.0  # the interval's lower end must exceed it (relative gain in expected goodput)
    max_domain_loss: float = 0.05  # relative loss allowed on any one domain, and on the offline set
    domain_requests: int = 8  # domains with fewer held-out requests are not judged alone
    offline_samples: int = 32
    max_gamma: int = 4  # lengths considered
    draft_cost: float | None = None  # cost of a draft step in target steps; null: from the models' sizes
    verify_cost: float = 0.05  # cost of each further token in a verification, in target steps
    busy_share: float = 0.05  # share of time that judging may take from a busy engine
    canary_requests: int = 0  # requests that a candidate serves on trial before it is promoted; 0: no trial
    rollback_requests: int = 32  # finished requests of a version before its acceptance can make it suspect
    window: int = 400  # newest finished requests of a version that its interval is made of
    collapse: float = 0.5  # alarm when the short average of acceptance falls below so much of the long one
    bootstrap_samples: int = 1000

    def __post_init__(self) -> None:
        for name in ("requests", "min_requests", "domain_requests", "max_gamma", "rollback_requests"):
            require(getattr(self, name) >= 1, f"gate.{name}={getattr(self, name)} must be at least 1")
        for name in ("offline_samples", "verify_cost", "canary_requests"):
            require(getattr(self, name) >= 0, f"gate.{name}={getattr(self, name)} must be at least 0")
        require(
            self.min_requests <= self.requests,
            f"gate.min_requests={self.min_requests} is above gate.requests={self.requests}",
        )
        require(self.margin >= 0, f"gate.margin={self.margin} must be at least 0")
        require(self.max_domain_loss >= 0, f"gate.max_domain_loss={self.max_domain_loss} must be at least 0")
        require(0 < self.busy_share <= 1, f"gate.busy_share={self.busy_share} must be in (0, 1]")
        require(0 <= self.collapse < 1, f"gate.collapse={self.collapse} must be in [0, 1)")
        require(self.window >= self.rollback_requests, f"gate.window={self.window} is below gate.rollback_requests")
        require(self.bootstrap_samples >= 100, f"gate.bootstrap_samples={self.bootstrap_samples} must be at least 100")
        cost = self.draft_cost
        require(cost is None or cost > 0, f"gate.draft_cost={cost} must be above 0, or null")


@dataclass
class AdaptCommand:
    """`distill adapt`: train a draft on logged traffic, beside a server or once over a recorded log."""

    online: OnlineConfig = field(default_factory=lambda: OnlineConfig(mode="decoupled"))
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    once: bool = False  # one update over what is logged now, then the end
    judge: bool = False  # once: load the target, judge the new version and promote it if it is better
    max_updates: int | None = None  # end after so many
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_online_loss(self.loss)
        require(
            not self.judge or self.once, "judge=true goes with once=true: a server judges what is trained beside it"
        )
        require(
            not self.judge or self.gate.canary_requests == 0,
            f"gate.canary_requests={self.gate.canary_requests} needs live traffic; leave it to the server's gate",
        )
        require(self.max_updates is None or self.max_updates >= 1, f"max_updates={self.max_updates} must be at least 1")


@dataclass
class ReplayCommand:
    """`distill replay`: look into the log of live traffic, export it, or delete a tenant's records."""

    action: str = "inspect"  # inspect | export | delete
    online: OnlineConfig = field(default_factory=OnlineConfig)
    tenant: str | None = None  # delete: whose records; export: only this one's
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("action", self.action, ("inspect", "export", "delete"))
        require(self.action != "delete" or bool(self.tenant), "name the tenant whose records go: tenant=NAME")


@dataclass
class VersionsCommand:
    """`distill versions`: list, show, promote, roll back or clear away the draft's versions."""

    action: str = "list"  # list | show | promote | rollback | gc
    online: OnlineConfig = field(default_factory=OnlineConfig)
    version: str | None = None  # show, promote: its name
    keep: int = 3  # gc: how many of the newest versions out of service stay
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("action", self.action, ("list", "show", "promote", "rollback", "gc"))
        require(
            self.action not in ("show", "promote") or bool(self.version),
            f"name the version to {self.action}: version=NAME (distill versions lists them)",
        )
        require(self.keep >= 0, f"keep={self.keep} must be at least 0")


def check_online_loss(loss: LossConfig) -> None:
    """Raise `ConfigError` for a loss that a log of the target's best tokens cannot give."""
    require("tvdpp" not in loss.terms, "loss=tvdpp needs text that the draft wrote; the log holds the target's")
    require(loss.temperature == 1.0, f"loss.temperature={loss.temperature} must be 1: the log holds raw signals")
    require(
        loss.select_fraction is None, "loss.select_fraction does not go with online adaptation; use adapt.positions"
    )
