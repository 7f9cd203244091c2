"""The figures of online adaptation, each declared once.

/metrics, the dashboard's tiles and GET /admin/online are made from the declarations. A new figure is one field of
`OnlineFigures`, and its value where the figures are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import nan
from typing import Any

from distillspec.serving.server.bridge.figure import Figure, Tile, counter, counters, duration, gauge, size, text

DECISIONS = ("promoted", "inconclusive", "refused")
WORK = ("loading", "judging", "learning")  # of the trainer
DROPS = ("memory", "queue", "disk", "error", "incomplete", "capped", "redacted", "deleted")
STAGES = (
    *("off", "gone", "elsewhere", "waiting_for_text", "starting", "waiting", "judging", "selecting"),
    *("loading", "learning", "saving", "registering", "paused", "quarantined", "failing"),
)


@dataclass(frozen=True)
class JudgedVersion:
    """A version and its status."""

    version: str
    status: str  # promoted | inconclusive | refused | retired | rolled_back
    reason: str


@dataclass(frozen=True)
class OnlineFigures:
    """State of online adaptation. The defaults are those of a server without it.

    Counters start at 0 with the server, except those of the trainer and of refused shards, which the folder keeps.
    """

    mode: str = gauge(
        "online_enabled", "1 with online=on or decoupled", "off", status="mode", number=lambda m: m != "off"
    )
    stage: str = gauge(
        "trainer_stage",
        "1 for what the trainer is doing",
        "off",
        label="stage",
        values=STAGES,
        status="trainer.stage",
        tile=Tile("trainer", lambda o: o.stage.replace("_", " ")),
    )
    problem: str | None = text(
        "Reason why the trainer is quarantined",
        status="trainer.quarantined",
        trouble="The trainer is quarantined: {}",
    )
    failing: str | None = text(
        "Reason why the trainer is started again only after long pauses",
        status="trainer.failing",
        trouble="The trainer keeps ending: {}",
    )
    paused: bool = gauge(
        "online_paused",
        "1 while logging and training are paused by hand",
        False,
        status="trainer.paused",
        trouble="Logging and training are paused.",
    )
    updates: int = counter("trainer_updates", "updates", "Updates made", status="trainer.updates", tile=Tile("updates"))
    starts: int = counter(
        "trainer_starts",
        "starts",
        "Starts of the embedded trainer's process",
        status="trainer.starts",
        tile=Tile("starts"),
    )
    trainer_cpu_s: Mapping[str, float] = counters(
        "trainer_cpu_seconds",
        "seconds",
        "Processor time of judging and of updates that ended",
        "work",
        WORK,
        tile=Tile("processor time", lambda o: o.processor_time),
    )
    cpu_s_per_gained_token: float | None = gauge(
        "trainer_cpu_seconds_per_gained_token",
        "Its processor time by tokens that learning gained, NaN for none",
        None,
        number=lambda s: nan if s is None else s,
        status="cpu_s_per_gained_token",
        tile=Tile("per token gained", lambda o: o.time_per_token),
    )
    trainer_s: float = counter("trainer_seconds", "seconds", "Wall time of updates", 0.0)
    lag: int = gauge(
        "trainer_lag_answers",
        "Logged answers it has not considered",
        unit="answers",
        status="trainer.lag",
        tile=Tile("answers to learn from"),
    )
    skipped: int = counter("trainer_skipped_answers", "answers", "Answers it had no time for", status="trainer.skipped")
    answers: int = gauge(
        "replay_answers",
        "Answers in the replay log",
        unit="answers",
        status="log.answers",
        tile=Tile("log", lambda o: f"{o.answers} answers, {size(o.bytes)}"),
    )
    tokens: int = gauge("replay_tokens", "Their tokens", unit="tokens", status="log.tokens")
    bytes: int = gauge("replay_bytes", "Their bytes on disk", unit="bytes", status="log.bytes")
    waiting_tokens: int = gauge(
        "replay_waiting_tokens", "Tokens in memory that wait to be written", unit="tokens", status="log.waiting_tokens"
    )
    logged: int = counter("replay_logged_answers", "answers", "Answers taken into the log")
    log_cpu_s: float = counter(
        "replay_cpu_seconds",
        "seconds",
        "Processor time of recording and writing, from above",
        0.0,
        status="log.cpu_s",
    )
    dropped: Mapping[str, int] = counters(
        "replay_dropped_answers",
        "answers",
        "Answers left out of the log",
        "reason",
        DROPS,
        tile=Tile("left out of the log", lambda o: str(sum(o.dropped.values()))),
    )
    refused_shards: int = counter(
        "replay_refused_shards", "shards", "Files of the log found damaged or foreign", status="log.refused_shards"
    )
    promotions: int = counter(
        "draft_promotions", "promotions", "Versions promoted, by the gate or by hand", tile=Tile("promoted")
    )
    rollbacks: int = counter(
        "draft_rollbacks", "rollbacks", "Versions rolled back, by themselves or by hand", tile=Tile("rolled back")
    )
    serving: str | None = text(
        "Name of the promoted version", status="serving", tile=Tile("serving", lambda o: o.serving or "–")
    )
    waiting_for: str | None = text("Reason why the newest candidate is not judged yet", status="waiting_for")
    verdicts: Mapping[str, int] = counters(
        "gate_verdicts", "verdicts", "Candidates judged", "decision", DECISIONS, tile=Tile("gate", lambda o: o.gate)
    )
    judged: tuple[JudgedVersion, ...] = text("The versions judged last, oldest first", ())
    collapsed: bool = gauge(
        "acceptance_collapsed",
        "1 while acceptance is a part of what it was",
        False,
        status="served.collapsed",
        trouble="Acceptance has collapsed.",
    )
    suspected: bool = gauge("draft_suspected", "1 while a draft is suspected: worse than before, or not judged", False)
    alarms: int = counter("online_alarms", "alarms", "Alarms of online adaptation")

    @property
    def processor_time(self) -> str:
        """Text of its tile."""
        return ", ".join([f"{duration(self.trainer_cpu_s.get(work, 0.0))} {work}" for work in WORK])

    @property
    def time_per_token(self) -> str:
        """Text of its tile."""
        return "–" if self.cpu_s_per_gained_token is None else duration(self.cpu_s_per_gained_token)

    @property
    def gate(self) -> str:
        """Text of the gate's tile: what it waits for, or its verdicts besides promotions."""
        if self.waiting_for:
            return f"waits: has {self.waiting_for}"
        return f"{self.verdicts.get('inconclusive', 0)} inconclusive, {self.verdicts.get('refused', 0)} refused"


def declarations(kind: type[OnlineFigures] = OnlineFigures) -> Mapping[str, Figure]:
    """Return the declaration of each field."""
    return {item.name: item.metadata["figure"] for item in fields(kind)}


def set_in_status(figures: OnlineFigures, status: dict[str, Any]) -> None:
    """Write the figures to their places in the body of GET /admin/online."""
    for name, figure in declarations().items():
        if figure.status is not None:
            *groups, key = figure.status.split(".")
            part = status
            for group in groups:
                part = part.setdefault(group, {})
            part[key] = getattr(figures, name)


def without_names(figures: OnlineFigures) -> OnlineFigures:
    """Return the figures without texts that may name domains: names of drafts, and reasons."""
    problem, failing = (reason and "an operator sees why" for reason in (figures.problem, figures.failing))
    return replace(figures, problem=problem, failing=failing, serving=None, waiting_for=None, judged=())


def tiles(figures: OnlineFigures) -> list[tuple[str, str]]:
    """Return (label, text) of every tile of the dashboard."""
    return [
        (figure.tile.label, str(getattr(figures, name)) if figure.tile.text is None else figure.tile.text(figures))
        for name, figure in declarations(type(figures)).items()
        if figure.tile is not None
    ]


def troubles(figures: OnlineFigures) -> list[str]:
    """Return the sentences about what an operator should look at."""
    set_now = ((figure.trouble, getattr(figures, name)) for name, figure in declarations(type(figures)).items())
    return [trouble.format(value) for trouble, value in set_now if trouble is not None and value]
