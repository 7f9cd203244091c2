"""Rounds: every side of a comparison under the same loads by turns, their figures and ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from distillspec.evaluation.measured import in_turn
from distillspec.files import write_json
from distillspec.serving.bench.compare import speed_ratio
from distillspec.serving.bench.load import Arrival
from distillspec.serving.bench.plot import plot_load
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.summary import LoadSummary, summarise

P = TypeVar("P")
Side = Callable[[Sequence[Arrival[P]], str], LoadRecord]  # runs a load, with a title for the progress line
Records = dict[float, dict[str, list[LoadRecord]]]  # by requests a second, then side: one a round
Summaries = dict[str, dict[float, LoadSummary]]  # by side, then requests a second
Ratios = dict[float, dict[str, dict[str, float]]]  # by requests a second, then side: times faster than the first side


def take_turns(
    sides: Mapping[str, Side[P]],
    rates: Sequence[float],
    rounds: int,
    load: Callable[[float, int], Sequence[Arrival[P]]],
) -> Records:
    """Run `load(rate, round)` on each side. Rounds start with different sides."""
    names = list(sides)
    records: Records = {rate: {name: [] for name in names} for rate in rates}
    for rate in rates:
        for round_ in range(rounds):
            arrivals = load(rate, round_)
            for name in in_turn(names, round_):
                records[rate][name].append(sides[name](arrivals, f"{rate:g} requests/s, {name}"))
    return records


def figures(records: Records) -> Summaries:
    """Summarise every side, its rounds joined."""
    names = next(iter(records.values()))
    return {
        name: {rate: summarise(LoadRecord.joined(found[name])) for rate, found in records.items()} for name in names
    }


def times_faster(records: Records, first: str, seed: int) -> Ratios:
    """Compare every other side with the first. Sides without an answered request in common are left out."""
    return {
        rate: {
            name: asdict(speed_ratio(found, name, first, seed).value)
            for name in found
            if name != first and _share_answers(found[name], found[first])
        }
        for rate, found in records.items()
    }


def write_records(records: Records, summaries: Summaries, side: str, folder: Path) -> None:
    """Write `requests.json`, an entry an answer, and `load.png`."""
    highest = records[max(records)]
    plot_load(summaries, {name: rounds[-1] for name, rounds in highest.items()}, folder / "load.png")
    write_json(folder / "requests.json", _requests(records, side))


def as_json(summaries: Summaries) -> dict[str, Any]:
    """Return summaries for JSON, by side, then requests a second."""
    return {name: {str(rate): s.to_json() for rate, s in by_rate.items()} for name, by_rate in summaries.items()}


def _share_answers(mine: Sequence[LoadRecord], theirs: Sequence[LoadRecord]) -> bool:
    return any(
        {request.id for request in one.requests} & {request.id for request in other.requests}
        for one, other in zip(mine, theirs, strict=True)
    )


def _requests(records: Records, side: str) -> list[dict[str, object]]:
    return [
        {"rate": rate, side: name, "round": round_, **asdict(request)}
        for rate, by_side in records.items()
        for name, rounds in by_side.items()
        for round_, record in enumerate(rounds)
        for request in record.requests
    ]
