"""`distill serve`: the engine, the HTTP server, and online adaptation."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, require
from distillspec.config.engine import EngineConfig, check_named_drafts, proposer_choice
from distillspec.config.models import ServedDraftConfig, TargetConfig, check_drafts
from distillspec.config.online_commands import check_online_loss
from distillspec.config.online_groups import OnlineGroups
from distillspec.config.pool import with_members
from distillspec.config.serving import ServerConfig


@dataclass
class ServedGroups:
    """The engine's settings and its HTTP server's. A base class, so that help lists them before those of learning."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: ServedDraftConfig = field(default_factory=ServedDraftConfig)
    drafts: list[str] = field(
        default_factory=list
    )  # several, in place of draft.path; suffix, ngram … may be among them
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass
class ServeCommand(OnlineGroups, ServedGroups):
    """`distill serve`: OpenAI's HTTP interface in front of the engine, with a dashboard.

    online=on: the draft learns from the traffic. A part of it is logged as token ids. A trainer process learns from the
    log. A new version serves if it is better on answers that it has not learnt from. It is rolled back if it is worse.
    draft.path=FOLDER is needed at the first start only. Later ones take the last promoted version in online.folder.
    online=decoupled: as on, with a trainer started elsewhere by `distill adapt online.folder=FOLDER`.
    """

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_drafts(self.draft, self.drafts)
        self.drafts, self.engine = with_members(self.drafts, self.engine)
        if not self.drafts:
            check_named_drafts(self.engine, ())
        if self.online.mode != "off":
            self._check_online()

    def _check_online(self) -> None:
        check_online_loss(self.loss)
        word, named = f"online={self.online.mode}", self.engine.proposers
        require(
            not named or any("draft" in proposer_choice(name).needs for name in named),
            f"{word} teaches a draft, and engine.proposer={self.engine.proposer} uses none; leave it out",
        )
        require(
            not self.engine.named_drafts,
            f"{word} teaches each draft the requests that it is chosen for, and engine.proposer={self.engine.proposer} "
            "names drafts; leave it out, or use draft_model",
        )
        require(
            self.engine.is_exact,
            f"{word} learns from exact answers, and engine.verification={self.engine.verification} is lossy; "
            "leave it out",
        )
        require(
            self.server.drafts_folder is None,
            f"server.drafts_folder={self.server.drafts_folder} goes with online=off; with {word} the drafts are the "
            "versions in online.folder",
        )
