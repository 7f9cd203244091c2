"""Figures of the live comparison: times per token by turn, ratios after the shift, events, CPU time, and the goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from distillspec.errors import RunError
from distillspec.evaluation.bootstrap import interval
from distillspec.files import read_lines, write_png
from distillspec.recipes.osd.goals import SAMPLES
from distillspec.recipes.osd.live_goals import GOALS, met
from distillspec.recipes.osd.side import Side, Turn

WINDOW = 3  # turns
EVENTS = ("verdict", "rollback", "swap", "alarm", "update")


@dataclass(frozen=True)
class Plan:
    """The domain of every turn. From turn `shifted_from` on it is not the draft's own."""

    domains: Sequence[str]
    shifted_from: int


def figures(sides: Sequence[Side], plan: Plan, seed: int) -> dict[str, Any]:
    """Return the figures of the turns that all sides have had."""
    turns = {side.name: side.turns for side in sides}
    count = min(map(len, turns.values()))
    shifted = slice(plan.shifted_from, count)
    record: dict[str, Any] = {
        "domains": list(plan.domains[:count]),
        "shifted_from": plan.shifted_from,
        "turns": {name: [_of_turn(turn) for turn in side_turns[:count]] for name, side_turns in turns.items()},
        "cpu": {side.name: _cpu(side, count) for side in sides},
        "events": {side.name: list(_events(side, plan.shifted_from)) for side in sides if side.folder},
    }
    for name, other in (("online", "static"), ("online", "none"), ("static", "none")):
        if name in turns and other in turns:
            mine, theirs = turns[name], turns[other]
            record[f"{name}_over_{other}"] = {
                "own_domain": times_faster(mine[: plan.shifted_from], theirs[: plan.shifted_from], seed),
                "shifted": times_faster(mine[shifted], theirs[shifted], seed),
                "windows": [
                    _window(mine, theirs, first, record["events"].get(name, ()), seed)
                    for first in range(count - WINDOW + 1)
                ],
            }
    return {**record, "goals": GOALS, "met": met(record)}


def times_faster(mine: Sequence[Turn], theirs: Sequence[Turn], seed: int) -> dict[str, Any] | None:
    """Return how many times faster `mine` wrote a token than `theirs`, over the same turns, None without requests.

    median: of the turns' ratios, each of the medians of time per output token.
    over_requests: Σ of their times per token / Σ of mine, over requests that both answered, with its interval.
    """
    ratios, pairs = [], []
    for my_turn, their_turn in zip(mine, theirs, strict=False):
        ratios.append(median(_times(their_turn).values()) / median(_times(my_turn).values()))
        my_times, their_times = _times(my_turn), _times(their_turn)
        pairs += [(their_times[id_], my_times[id_]) for id_ in my_times.keys() & their_times.keys()]
    if not pairs:
        return None
    over = interval([their_s for their_s, _ in pairs], [my_s for _, my_s in pairs], SAMPLES, seed)
    return {"median": median(ratios), "turns": len(ratios), "requests": len(pairs), "over_requests": asdict(over)}


def table(record: dict[str, Any]) -> str:
    """Return Markdown: a row a turn, then the ratios."""
    names = list(record["turns"])
    heads = [f"{name} ms/token | {name} accepted" for name in names]
    lines = ["| turn | domain | " + " | ".join(heads) + " |", "|---" * (2 + 2 * len(names)) + "|"]
    for index, domain in enumerate(record["domains"]):
        cells = [record["turns"][name][index] for name in names]
        texts = [f"{cell['ms_per_token']:.1f} | {_share(cell['accepted'], cell['proposed'])}" for cell in cells]
        lines.append(f"| {index + 1} | {domain} | " + " | ".join(texts) + " |")
    lines.append("")
    for key, ratio in record.items():
        if "_over_" in key:
            for when in ("own_domain", "shifted"):
                lines.append(f"{key.replace('_', ' ')}, {when.replace('_', ' ')}: {_ratio(ratio[when])}")
    return "\n".join(lines) + "\n"


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot the time per output token over the turns, a line a side."""
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axis = figure.subplots()
    for name, turns in record["turns"].items():
        axis.plot(range(1, len(turns) + 1), [turn["ms_per_token"] for turn in turns], "o-", label=name)
    domains = record["domains"]
    for index, domain in enumerate(domains):
        if index == 0 or domain != domains[index - 1]:
            axis.axvline(index + 0.5, color="grey", linewidth=0.6)
            axis.text(index + 0.6, 0.02, domain, transform=axis.get_xaxis_transform())
    axis.set_xlabel("turn")
    axis.set_ylabel("ms per output token, median")
    axis.set_ylim(bottom=0)
    axis.legend()
    write_png(path, figure)


def _window(
    mine: Sequence[Turn], theirs: Sequence[Turn], first: int, events: Sequence[dict[str, Any]], seed: int
) -> dict[str, Any] | None:
    """Return `times_faster` of the turns from `first` on, and how many updates ran in them."""
    last = first + WINDOW - 1
    ratio = times_faster(mine[first : last + 1], theirs[first : last + 1], seed)
    updates = [event for event in events if event["event"] == "update"]
    running = sum(event["began_turn"] <= last and event["turn"] >= first for event in updates)
    return None if ratio is None else {**ratio, "updates": running}


def _times(turn: Turn) -> dict[str, float]:
    """Return seconds per output token by request, without answers whose tokens all came at once.

    Raises:
        RunError: all answers came at once.
    """
    times = {request.id: request.time_per_token_s for request in turn.record.requests}
    spread = {id_: time for id_, time in times.items() if time}
    if not spread:
        raise RunError("a turn has no answer whose tokens came one after another: give more --max-tokens")
    return spread


def _of_turn(turn: Turn) -> dict[str, Any]:
    requests, times = turn.record.requests, sorted(_times(turn).values())
    return {
        "requests": len(requests),
        "failed": turn.record.failed,
        "ms_per_token": 1e3 * median(times),
        "p95_ms_per_token": 1e3 * times[int(0.95 * (len(times) - 1))],
        "tokens": sum(request.output_tokens for request in requests),
        "busy_rows": sum(request.latency_s for request in requests) / turn.record.seconds,
        "proposed": sum(request.proposed or 0 for request in requests),
        "accepted": sum(request.accepted or 0 for request in requests),
    }


def _cpu(side: Side, count: int) -> dict[str, Any]:
    """Return CPU seconds of server and trainer in the side's turns.

    For a side that learns they are split by work too, from the last metrics, in seconds and as shares of both sums.
    """
    turns = side.turns[:count]
    cpu_s = {"server_s": sum(turn.cpu.server for turn in turns), "trainer_s": sum(turn.cpu.trainer for turn in turns)}
    lines = [] if side.folder is None else read_lines(side.folder / "metrics.jsonl")
    reports = [line for line in lines if line["event"] == "figures"]
    if not reports or not turns:
        return cpu_s
    by_work = {**reports[-1]["trainer"]["cpu_s_by_work"], "logging": reports[-1]["log"]["cpu_s"]}
    whole_s = sum(cpu_s.values())
    return {**cpu_s, "by_work_s": by_work, "shares": {work: seconds / whole_s for work, seconds in by_work.items()}}


def _events(side: Side, shifted_from: int) -> Iterator[dict[str, Any]]:
    """Yield the events of server and trainer in order, each with its turn, and its time in turns of the side.

    This time counts from the shift. An update is yielded at its end, and names the turn that it began in too.
    """
    assert side.folder is not None
    lines = [*read_lines(side.folder / "metrics.jsonl"), *read_lines(side.folder / "trainer" / "metrics.jsonl")]
    for event in sorted((event for event in lines if event["event"] in EVENTS), key=itemgetter("time_s")):
        first = {"began_turn": _turn_at(side, event["began_s"])} if "began_s" in event else {}
        since = _own_seconds(side.turns, shifted_from, event["time_s"])
        yield {**event, **first, "turn": _turn_at(side, event["time_s"]), "since_shift_s": since}


def _turn_at(side: Side, time_s: float) -> int:
    """Return the turn that the side last began by then, -1 for none."""
    return sum(turn.began_s <= time_s for turn in side.turns) - 1


def _own_seconds(turns: Sequence[Turn], first: int, until_s: float) -> float | None:
    """Return the seconds of turns from `first` on that lie before `until_s`. None: it is before them."""
    if len(turns) <= first or until_s < turns[first].began_s:
        return None
    return sum(max(0.0, min(turn.ended_s, until_s) - turn.began_s) for turn in turns[first:])


def _share(accepted: int, proposed: int) -> str:
    return f"{accepted / proposed:.2f}" if proposed else "–"


def _ratio(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "no turn yet"
    over = ratio["over_requests"]
    return (
        f"{ratio['median']:.3f} in the median, {over['mean']:.3f} [{over['low']:.3f}, {over['high']:.3f}] over requests"
    )
