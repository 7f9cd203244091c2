"""The groups of settings of online adaptation: one list for `distill serve` and for what learns."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.loss import LossConfig
from distillspec.config.online import AdaptConfig, GateConfig, OnlineConfig, ReplayConfig
from distillspec.config.training import TrackerConfig


@dataclass
class OnlineGroups:
    """Everything online adaptation is set by."""

    online: OnlineConfig = field(default_factory=OnlineConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    loss: LossConfig = field(default_factory=LossConfig)  # of the online trainer
    tracker: TrackerConfig = field(default_factory=TrackerConfig)  # of the online trainer
    seed: int = 0
