"""Paths in an `online.folder`, and the small JSON messages between server and trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from distillspec.config import AdaptCommand, OnlineGroups, ServeCommand, TargetConfig
from distillspec.errors import ConfigError
from distillspec.files import private_folder, write_json
from distillspec.serving.online.state.version import ONLY

REGISTRY, MANIFEST = "registry.sqlite", "manifest.sqlite"  # of the versions and of the replay log
ANSWERS = "answers"  # folder of what proposers without a model keep, beside the log

LOG_BYTES = 64 << 20  # of a log of figures or of the trainer's output, and of the one before it: weeks

M = TypeVar("M", bound="_Message")


@dataclass
class OnlineSettings(OnlineGroups):
    """All settings of online adaptation.

    The trainer loads `target` for drafts that read its states or embeddings, and for no others.
    """

    target: TargetConfig = field(default_factory=TargetConfig)

    @classmethod
    def of(cls, command: AdaptCommand | ServeCommand) -> OnlineSettings:
        """Take the groups that a command has. The others keep their defaults."""
        return cls(**{f.name: getattr(command, f.name) for f in fields(cls) if hasattr(command, f.name)})

    @property
    def layout(self) -> Layout:
        return Layout(Path(self.online.folder))


@dataclass(frozen=True)
class Layout:
    """Paths in an online folder.

    `state` and `memory` are what the trainer knows of one draft, `member`. Drafts share everything else.
    """

    root: Path
    member: str = ONLY

    def of(self, member: str) -> Layout:
        """Return the paths of another draft of the same folder."""
        return replace(self, member=member)

    @property
    def replay(self) -> Path:
        return self.root / "replay"

    @property
    def answers(self) -> Path:
        return self.root / ANSWERS

    @property
    def versions(self) -> Path:
        return self.root / "versions"

    @property
    def registry(self) -> Path:
        return self.versions / REGISTRY

    @property
    def manifest(self) -> Path:
        return self.replay / MANIFEST

    @property
    def costs(self) -> Path:
        return self.root / "costs.json"

    @property
    def trainer(self) -> Path:
        return self.root / "trainer"

    @property
    def state(self) -> Path:
        return self._draft_folder / "state.json"

    @property
    def scores(self) -> Path:
        return self.trainer / "scores.sqlite"

    @property
    def memory(self) -> Path:
        return self._draft_folder / "optimizer.pt"

    @property
    def heartbeat(self) -> Path:
        return self.trainer / "heartbeat"

    @property
    def control(self) -> Path:
        return self.trainer / "control.json"

    @property
    def settings(self) -> Path:
        return self.trainer / "settings.json"

    @property
    def _draft_folder(self) -> Path:
        return self.trainer / "drafts" / self.member if self.member else self.trainer

    def check_usable(self) -> None:
        """Raise `ConfigError` if the folder cannot be made, or what it holds not be read and written. Makes nothing."""
        folders, files = (self.replay, self.versions, self.trainer, self.answers), (self.manifest, self.registry)
        try:
            there = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
            parts = [path for path in (there, *folders, *files) if path.exists()]
        except PermissionError as error:
            raise ConfigError(
                f"online.folder={self.root} cannot be read: no permission for {error.filename}"
            ) from error
        for path in parts:
            if path not in files and not path.is_dir():
                raise ConfigError(f"online.folder={self.root} cannot be used: {path} is a file")
            if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)):
                raise ConfigError(f"online.folder={self.root} cannot be used: no permission to read and write {path}")

    def make_versions(self) -> None:
        """Make the folder of the versions. Raise `ConfigError` if it cannot be made."""
        try:
            private_folder(self.versions)
        except OSError as error:
            raise ConfigError(f"online.folder={self.root} cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class _Message:
    """A small JSON file, written atomically.

    Unknown fields are ignored and missing ones get their default, so that releases may differ.
    """

    @classmethod
    def read(cls: type[M], path: Path) -> M:
        """Read the message. Without a readable file: all defaults."""
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError):
            return cls()
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    def with_(self: M, **changes: Any) -> M:
        return replace(self, **changes)


# Fields that are added up over the states of several drafts.
ADDED = ("updates", "learnt", "skipped", "capped", "cpu_s", "loading_cpu_s", "judging_cpu_s", "seconds")


@dataclass(frozen=True)
class TrainerState(_Message):
    """State of the trainer between updates of one draft.

    Only the process that holds its lock writes it, except the first state of a specialist that is not listed yet.
    """

    cursor: int = 0  # number of the last logged answer that an update considered
    asked: int = 0  # updates by hand that were made, well or badly (`TrainerControl.asked`)
    updates: int = 0
    bad_updates: int = 0  # in a row
    learnt: int = 0  # new answers it learnt from
    skipped: int = 0  # new answers it had no time for
    capped: int = 0  # new answers learnt from at less than full weight, because their tenant was over its share
    cpu_s: float = 0.0  # processor time of learning
    loading_cpu_s: float = 0.0  # of choosing and loading for updates, and of saving what they made
    judging_cpu_s: float = 0.0
    seconds: float = 0.0  # wall time of learning
    working: str | None = None  # last candidate, trained further unless it is refused
    quarantined: str | None = None  # why it must not be restarted
    stage: str = "starting"
    pid: int = 0
    drift: dict[str, Any] = field(default_factory=dict)

    @property
    def drop_rate(self) -> float:
        """Share of the new answers that it had no time for."""
        new = self.learnt + self.skipped
        return self.skipped / new if new else 0.0

    @property
    def cpu_s_by_work(self) -> dict[str, float]:
        """Processor time of judging and of updates that ended."""
        return {"loading": self.loading_cpu_s, "judging": self.judging_cpu_s, "learning": self.cpu_s}

    def cpu_s_per(self, tokens: float) -> float | None:
        """Return the processor time of all work for each of `tokens`. None: there are none."""
        return sum(self.cpu_s_by_work.values()) / tokens if tokens > 0 else None

    @classmethod
    def sum_of(cls, states: Sequence[TrainerState]) -> TrainerState:
        """Return the state of a trainer of several drafts: counts added up, and the stage of the one at work."""
        if len(states) < 2:
            return states[0] if states else cls()
        busy = next((state for state in states if state.stage != "waiting"), states[0])
        stuck = [state.quarantined for state in states if state.quarantined]
        return busy.with_(
            **{name: sum([getattr(state, name) for state in states]) for name in ADDED},
            cursor=max([state.cursor for state in states]),
            asked=max([state.asked for state in states]),
            quarantined=stuck[0] if len(stuck) == len(states) else None,
            drift={cluster: pair for state in states for cluster, pair in state.drift.items()},
        )


def read_states(layout: Layout, members: Iterable[str]) -> TrainerState:
    """Return the state of the trainer of these drafts together."""
    return TrainerState.sum_of([TrainerState.read(layout.of(member).state) for member in members])


def lift_quarantine(layout: Layout, members: Iterable[str]) -> None:
    """Let every draft be trained again. The operator has looked into it."""
    for path in [layout.of(member).state for member in members]:
        state = TrainerState.read(path)
        if state.quarantined:
            state.with_(quarantined=None, bad_updates=0, working=None).write(path)


@dataclass(frozen=True)
class TrainerControl(_Message):
    """Requests of the server to the trainer."""

    paused: bool = False
    asked: int = 0  # updates requested by hand so far
    suspected: bool = False  # a version in service is to be compared with its predecessor
    urgent_until_s: float = 0.0  # since the epoch: until then that goes before updates


@dataclass(frozen=True)
class Tracked(_Message):
    """Progress of a tracker's run. Its steps only grow, in whichever process it continues."""

    step: int = 0
    offset: int = 0  # bytes of the server's metrics.jsonl
