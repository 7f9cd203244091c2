"""What the server asks of online adaptation, which is another part's work, and what it shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from distillspec.serving.core import StepOutput

DECISIONS = ("promoted", "inconclusive", "refused")
DROPS = ("memory", "queue", "disk", "error", "incomplete", "capped", "redacted", "deleted")
STAGES = (
    *("off", "gone", "elsewhere", "waiting_for_text", "starting", "waiting", "selecting", "loading"),
    *("learning", "saving", "registering", "paused", "quarantined"),
)


@dataclass(frozen=True)
class Judged:
    """A version and what became of it."""

    version: str
    status: str  # promoted | inconclusive | refused | retired | rolled_back
    reason: str


@dataclass(frozen=True)
class OnlineFigures:
    """How online adaptation stands; the defaults are those of a server without it."""

    mode: str = "off"  # off | on | decoupled
    serving: str | None = None  # the promoted version's name
    waiting_for: str | None = None  # why the newest candidate is not judged yet
    paused: bool = False
    collapsed: bool = False  # acceptance fell to a part of what it was
    suspected: bool = False  # what serves had less acceptance than its predecessor; not confirmed
    answers: int = 0  # in the replay log
    tokens: int = 0
    bytes: int = 0
    waiting_tokens: int = 0  # in memory, not yet written
    logged: int = 0  # answers since the start
    dropped: Mapping[str, int] = field(default_factory=dict)  # by `DROPS`
    refused_shards: int = 0  # files of the log that some process could not read
    verdicts: Mapping[str, int] = field(default_factory=dict)  # by `DECISIONS`
    promotions: int = 0  # by the gate and by hand
    rollbacks: int = 0
    alarms: int = 0
    stage: str = "off"  # the trainer's, of `STAGES`
    problem: str | None = None  # why the trainer is quarantined
    starts: int = 0  # of the trainer's process, by this server
    updates: int = 0
    trainer_cpu_s: float = 0.0
    trainer_s: float = 0.0
    lag: int = 0  # logged answers it has not considered
    skipped: int = 0  # logged answers it never will: traffic was faster
    judged: tuple[Judged, ...] = ()  # the newest last


class OnlineControl(Protocol):
    """Online adaptation as the server runs beside it and operators steer it. Results are plain JSON values.

    `on_step` is called by the engine's thread, the others may take a moment and are called in threads of their own.
    """

    @property
    def place(self) -> str:
        """The folder of log and versions."""
        ...

    def on_step(self, output: StepOutput) -> None:
        """After every step, with what it gave; never raises, never waits."""
        ...

    def figures(self) -> OnlineFigures:
        """For metrics and the page, every few seconds: cheap."""
        ...

    def status(self) -> dict[str, Any]:
        """Whether it runs, what it waits for, what it did last, with intervals."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def trigger(self) -> None:
        """Train a new version as soon as may be."""
        ...

    def verdicts(self) -> list[dict[str, Any]]:
        """What the gate decided, the newest last."""
        ...

    def stats(self) -> dict[str, Any]:
        """The replay log: records, bytes, tenants, what was dropped."""
        ...

    def delete_tenant(self, tenant: str) -> int:
        """Delete all logged answers of a tenant; how many there were."""
        ...
