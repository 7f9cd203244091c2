"""The commands on an `online.folder`: its trainer, its log, its versions."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, one_of, require
from distillspec.config.loss import LossConfig
from distillspec.config.models import TargetConfig
from distillspec.config.online import AdaptConfig, GateConfig, OnlineConfig
from distillspec.config.registry import LOSSES, find
from distillspec.config.training import TrackerConfig


@dataclass
class AdaptCommand:
    """`distill adapt`: train a draft on logged traffic, beside a server or once over a recorded log."""

    online: OnlineConfig = field(default_factory=lambda: OnlineConfig(mode="decoupled"))
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    once: bool = False  # end after one update over the log
    judge: bool = False  # with once: judge the new version by the newest answers, promote it if it is better
    retrain_without: str | None = None  # with once: a tenant to delete; drafts learn again from the others' answers
    max_updates: int | None = None  # updates after which it ends
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_online_loss(self.loss)
        require(
            not self.judge or self.once, "judge=true goes with once=true: a server judges what is trained beside it"
        )
        require(
            self.retrain_without is None or self.once,
            f"retrain_without={self.retrain_without} goes with once=true: it begins again from the given draft",
        )
        require(self.max_updates is None or self.max_updates >= 1, f"max_updates={self.max_updates} must be at least 1")


@dataclass
class ReplayCommand:
    """`distill replay`: inspect or export the log of live traffic, delete a tenant's records, or keep them out."""

    action: str = "inspect"  # inspect | export | delete | exclude (log nothing of a tenant) | include (again)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    tenant: str | None = None  # the tenant; export: none for all

    def __post_init__(self) -> None:
        one_of("action", self.action, ("inspect", "export", "delete", "exclude", "include"))
        needs = self.action in ("delete", "exclude", "include")
        require(not needs or bool(self.tenant), f"action={self.action} needs the tenant's name: tenant=NAME")


@dataclass
class VersionsCommand:
    """`distill versions`: list, show, promote, roll back or remove versions of the draft, or of several."""

    action: str = "list"  # list | show | promote | rollback | gc | withdraw (one of several learns and serves no more)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    version: str | None = None  # show, promote: name of the version
    name: str | None = None  # rollback, withdraw: name of the draft, where there are several
    keep: int = 3  # gc: number of the newest versions out of service that stay

    def __post_init__(self) -> None:
        one_of("action", self.action, ("list", "show", "promote", "rollback", "gc", "withdraw"))
        require(self.action != "withdraw" or bool(self.name), "name the draft to withdraw: name=NAME")
        require(
            self.action not in ("show", "promote") or bool(self.version),
            f"name the version to {self.action}: version=NAME (distill versions lists them)",
        )
        require(self.keep >= 0, f"keep={self.keep} must be at least 0")


def check_online_loss(loss: LossConfig) -> None:
    """Raise `ConfigError` for a loss that cannot learn from the log of live traffic."""
    for name in loss.terms:
        needs = find("loss.mix", name, LOSSES).needs
        require("draft_text" not in needs, f"loss={name} needs text that the draft wrote; the log holds the target's")
    require(loss.temperature == 1.0, f"loss.temperature={loss.temperature} must be 1: the log holds raw signals")
    require(
        loss.select_fraction is None, "loss.select_fraction does not go with online adaptation; use adapt.positions"
    )
