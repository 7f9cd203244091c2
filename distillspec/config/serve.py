"""`distill serve`: the engine, the HTTP server, and online adaptation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from distillspec.config.checks import check_seed, require
from distillspec.config.engine import EngineConfig
from distillspec.config.loss import LossConfig
from distillspec.config.models import DraftPathConfig, TargetConfig
from distillspec.config.online import AdaptConfig, GateConfig, OnlineConfig, ReplayConfig
from distillspec.config.online_commands import check_online_loss
from distillspec.config.serving import ServerConfig
from distillspec.config.training import TrackerConfig


@dataclass
class ServeCommand:
    """`distill serve`: OpenAI's HTTP interface in front of the engine, with a dashboard.

    online=on: the draft learns from the traffic. A part of it is logged as token ids. A trainer process learns from the
    log. A new version serves if it is better on held-out requests, and is rolled back if it is worse in service.
    draft.path=FOLDER is needed at the first start only. Later ones take the last promoted version in online.folder.
    online=decoupled: as on, with a trainer started elsewhere by `distill adapt online.folder=FOLDER`.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    loss: LossConfig = field(default_factory=LossConfig)  # of the online trainer
    tracker: TrackerConfig = field(default_factory=TrackerConfig)  # of the online trainer
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        self._check_offline() if self.online.mode == "off" else self._check_online()

    def _check_offline(self) -> None:
        for name, kind in (("replay", ReplayConfig), ("adapt", AdaptConfig), ("gate", GateConfig)):
            given, default = asdict(getattr(self, name)), asdict(kind())
            for key, value in given.items():
                require(value == default[key], f"{name}.{key}={value} needs online adaptation: add online=on")

    def _check_online(self) -> None:
        check_online_loss(self.loss)
        word = f"online={self.online.mode}"
        require(
            self.engine.proposer in (None, "draft_model", "lookup_else_model"),
            f"{word} teaches a draft, and engine.proposer={self.engine.proposer} uses none; leave it out",
        )
        require(
            self.server.drafts_folder is None,
            f"server.drafts_folder={self.server.drafts_folder} goes with online=off; with {word} the drafts are the "
            "versions in online.folder",
        )
