"""The figures of online adaptation, each declared once.

/metrics, the dashboard's state and GET /admin/online are made from the declarations. A new figure is one field of
`OnlineFigures`, and its value where the figures are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

DECISIONS = ("promoted", "inconclusive", "refused")
DROPS = ("memory", "queue", "disk", "error", "incomplete", "capped", "redacted", "deleted")
STAGES = (
    *("off", "gone", "elsewhere", "waiting_for_text", "starting", "waiting", "selecting", "loading"),
    *("learning", "saving", "registering", "paused", "quarantined"),
)


@dataclass(frozen=True)
class Figure:
    """Declaration of one figure.

    Args:
        kind: "text" is not in /metrics.
        help: one line for people, in /metrics too.
        metric: name in /metrics, without the prefix and without Prometheus' `_total`.
        unit: what is counted. The metric's name ends with it.
        label, values: the label that distinguishes the series of a metric, and all its values. The figure is then a
            mapping from value to number, or for a gauge the one value that is current.
        status: dotted place in the body of GET /admin/online, which has more than the figures.
        number: the figure as a number.
    """

    kind: Literal["counter", "gauge", "text"]
    help: str
    metric: str | None = None
    unit: str | None = None
    label: str | None = None
    values: tuple[str, ...] = ()
    status: str | None = None
    number: Callable[[Any], float] = float

    def series(self, value: Any) -> Iterator[tuple[list[str], float]]:
        """Yield (label values, number) of each series of the metric."""
        if self.label is None:
            yield [], self.number(value)
        elif isinstance(value, Mapping):
            yield from (([name], value.get(name, 0)) for name in self.values)
        else:
            yield from (([name], name == value) for name in self.values)


def _text(help: str, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"figure": Figure("text", help, **more)})


def _gauge(metric: str, help: str, default: Any = 0, **more: Any) -> Any:
    return field(default=default, metadata={"figure": Figure("gauge", help, metric, **more)})


def _counter(metric: str, unit: str, help: str, default: Any = 0, **more: Any) -> Any:
    return field(default=default, metadata={"figure": Figure("counter", help, metric, unit, **more)})


def _counters(metric: str, unit: str, help: str, label: str, values: tuple[str, ...]) -> Any:
    figure = Figure("counter", help, metric, unit, label, values)
    return field(default_factory=dict, metadata={"figure": figure})


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

    mode: str = _gauge(
        "online_enabled", "1 with online=on or decoupled", "off", status="mode", number=lambda m: m != "off"
    )
    serving: str | None = _text("Name of the promoted version", status="serving")
    waiting_for: str | None = _text("Reason why the newest candidate is not judged yet", status="waiting_for")
    paused: bool = _gauge(
        "online_paused", "1 while logging and training are paused by hand", False, status="trainer.paused"
    )
    collapsed: bool = _gauge(
        "acceptance_collapsed", "1 while acceptance is a part of what it was", False, status="served.collapsed"
    )
    suspected: bool = _gauge("draft_suspected", "1 while the draft's acceptance looks worse, unconfirmed", False)
    answers: int = _gauge("replay_answers", "Answers in the replay log", unit="answers", status="log.answers")
    tokens: int = _gauge("replay_tokens", "Their tokens", unit="tokens", status="log.tokens")
    bytes: int = _gauge("replay_bytes", "Their bytes on disk", unit="bytes", status="log.bytes")
    waiting_tokens: int = _gauge(
        "replay_waiting_tokens", "Tokens in memory that wait to be written", unit="tokens", status="log.waiting_tokens"
    )
    logged: int = _counter("replay_logged_answers", "answers", "Answers taken into the log")
    dropped: Mapping[str, int] = _counters(
        "replay_dropped_answers", "answers", "Answers left out of the log", "reason", DROPS
    )
    refused_shards: int = _counter(
        "replay_refused_shards", "shards", "Files of the log found damaged or foreign", status="log.refused_shards"
    )
    verdicts: Mapping[str, int] = _counters("gate_verdicts", "verdicts", "Candidates judged", "decision", DECISIONS)
    promotions: int = _counter("draft_promotions", "promotions", "Versions promoted, by the gate or by hand")
    rollbacks: int = _counter("draft_rollbacks", "rollbacks", "Versions rolled back, by themselves or by hand")
    alarms: int = _counter("online_alarms", "alarms", "Alarms of online adaptation")
    stage: str = _gauge(
        "trainer_stage", "1 for what the trainer is doing", "off", label="stage", values=STAGES, status="trainer.stage"
    )
    problem: str | None = _text("Reason why the trainer is quarantined", status="trainer.quarantined")
    starts: int = _counter(
        "trainer_starts", "starts", "Starts of the embedded trainer's process", status="trainer.starts"
    )
    updates: int = _counter("trainer_updates", "updates", "Updates made", status="trainer.updates")
    trainer_cpu_s: float = _counter(
        "trainer_cpu_seconds", "seconds", "Processor time of updates", 0.0, status="trainer.cpu_s"
    )
    trainer_s: float = _counter("trainer_seconds", "seconds", "Wall time of updates", 0.0)
    skipped: int = _counter(
        "trainer_skipped_answers", "answers", "Answers it had no time for", status="trainer.skipped"
    )
    lag: int = _gauge(
        "trainer_lag_answers", "Logged answers it has not considered", unit="answers", status="trainer.lag"
    )
    judged: tuple[JudgedVersion, ...] = _text("The versions judged last, oldest first", ())


@cache
def declarations() -> Mapping[str, Figure]:
    """Return the declaration of each field of `OnlineFigures`."""
    return {item.name: item.metadata["figure"] for item in fields(OnlineFigures)}


def set_in_status(figures: OnlineFigures, status: dict[str, Any]) -> None:
    """Write the figures to their places in the body of GET /admin/online."""
    for name, figure in declarations().items():
        if figure.status is not None:
            *groups, key = figure.status.split(".")
            place = status
            for group in groups:
                place = place.setdefault(group, {})
            place[key] = getattr(figures, name)
