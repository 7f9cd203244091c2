"""Declaration of one figure: its metric, its place in the admin's status, its tile on the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MIB = 1 << 20


@dataclass(frozen=True)
class Tile:
    """A figure's tile on the dashboard.

    Args:
        text: makes the text from all figures (`OnlineFigures`). Default: the figure itself.
    """

    label: str
    text: Callable[[Any], str] | None = None


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
        tile: its place on the dashboard. Tiles stand in the order of the declarations.
        trouble: sentence that the dashboard shows while the figure is set. `{}` stands for the figure.
    """

    kind: Literal["counter", "gauge", "text"]
    help: str
    metric: str | None = None
    unit: str | None = None
    label: str | None = None
    values: tuple[str, ...] = ()
    status: str | None = None
    number: Callable[[Any], float] = float
    tile: Tile | None = None
    trouble: str | None = None

    def series(self, value: Any) -> Iterator[tuple[list[str], float]]:
        """Yield (label values, number) of each series of the metric."""
        if self.label is None:
            yield [], self.number(value)
        elif isinstance(value, Mapping):
            yield from (([name], value.get(name, 0)) for name in self.values)
        else:
            yield from (([name], name == value) for name in self.values)


def text(help: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field for a figure that is not in /metrics."""
    return field(default=default, metadata={"figure": Figure("text", help, **more)})


def gauge(metric: str, help: str, default: Any = 0, **more: Any) -> Any:
    """Return a dataclass field for a figure that goes up and down."""
    return field(default=default, metadata={"figure": Figure("gauge", help, metric, **more)})


def counter(metric: str, unit: str, help: str, default: Any = 0, **more: Any) -> Any:
    """Return a dataclass field for a figure that only grows."""
    return field(default=default, metadata={"figure": Figure("counter", help, metric, unit, **more)})


def counters(metric: str, unit: str, help: str, label: str, values: tuple[str, ...], tile: Tile) -> Any:
    """Return a dataclass field for a counter with one series for each value of a label."""
    figure = Figure("counter", help, metric, unit, label, values, tile=tile)
    return field(default_factory=dict, metadata={"figure": figure})


def duration(seconds: float) -> str:
    """Return "7.5 ms", "250 ms" or "1.25 s"."""
    if seconds < 1:
        return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"
    return f"{seconds:.2f} s"


def size(count: int) -> str:
    """Return a number of bytes as "12 KiB" or "3.4 MiB"."""
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.0f} KiB"
