"""Table and picture of what an oracle would add to each shape."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distillspec.files import write_json, write_png, write_text
from distillspec.provenance import provenance
from distillspec.recipes.rates import best_on_odd, interval, ratios, shown

NONE = "none"
GOODPUT = "goodput"
CHAIN = "chain "


def chain(tokens: int) -> str:
    """Return the name of a chain of a fixed length."""
    return f"{CHAIN}{tokens}"


def cut(name: str) -> str:
    """Return the name of a shape that the oracle cuts."""
    return f"{name}, foreseen"


def write_room(cells: Sequence[Mapping[str, Any]], about: Mapping[str, Any], root: Path) -> str:
    """Write `room.json`, `room.md` and `room.png` under the root. Return the tables."""
    judged = [{**cell, **judge(cell)} for cell in cells]
    write_json(root / "room.json", {"cells": judged, **about, "provenance": provenance([], 0)})
    text = "\n\n".join(map(_table, judged)) + "\n"
    write_text(root / "room.md", text)
    _picture(judged, root / "room.png")
    return text


def judge(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the oracle adds, and the share of it that goodput reaches.

    Returns:
        room: tokens/s of each shape that is cut over those of the whole one, with two standard errors, over the rounds
            in which both took the same steps. Elsewhere roundings made them write different texts.
        alike: the number of these rounds.
        over_best: tokens/s of every side over those of the best fixed length, chosen on odd rounds, on even ones.
        share: log(goodput over the best fixed length) / log(the oracle's chain over it), None without room.
        accepted: tokens of the longest accepted path over the shape's levels.
    """
    rates, depths = cell["tokens_per_s"], cell["depths"]
    alike = {name: _alike(cell["tokens_per_step"], name) for name in depths}
    best = best_on_odd(rates, _fixed(cell))
    over = {name: interval(ratios(rates, name, best)[1::2]) for name in rates}
    oracle = max(over[cut(name)][0] for name in depths if name.startswith(CHAIN))
    return {
        "best": best,
        "room": {name: _room(rates, name, rounds) for name, rounds in alike.items()},
        "alike": {name: len(rounds) for name, rounds in alike.items()},
        "over_best": over,
        "share": math.log(over[GOODPUT][0]) / math.log(oracle) if oracle > 1 else None,
        "accepted": {
            name: (statistics.fmean(cell["tokens_per_step"][name]) - 1) / depth for name, depth in depths.items()
        },
    }


def _alike(lengths: Mapping[str, Sequence[float]], name: str) -> list[int]:
    """Return the rounds in which a shape and the cut one took steps of the same length."""
    pairs = enumerate(zip(lengths[name], lengths[cut(name)], strict=True))
    return [round_ for round_, (whole, foreseen) in pairs if math.isclose(whole, foreseen)]


def _room(rates: Mapping[str, Sequence[float]], name: str, rounds: Sequence[int]) -> tuple[float, float, float] | None:
    round_ratios = ratios(rates, cut(name), name)
    return interval([round_ratios[round_] for round_ in rounds]) if rounds else None


def _fixed(cell: Mapping[str, Any]) -> list[str]:
    """Return the fixed lengths, none among them, but for the chain that is cut: it is longer than any worth trying."""
    return [name for name in _sides(cell) if name == NONE or (name.startswith(CHAIN) and name not in cell["depths"])]


def _sides(cell: Mapping[str, Any]) -> list[str]:
    """Return all sides without an oracle."""
    return [name for name in cell["tokens_per_s"] if name not in map(cut, cell["depths"])]


def _table(cell: Mapping[str, Any]) -> str:
    """Return the shapes of one batch and temperature."""
    share = "no room" if cell["share"] is None else f"goodput reaches {cell['share']:.2f} of the oracle's gain"
    lines = [
        f"Batch {cell['batch']}, T = {cell['temperature']}; best fixed length: {cell['best']}; {share}",
        "",
        f"| shape | accepted of its levels | tokens/s | × {cell['best']} | foreseen, × {cell['best']} "
        "| × the shape, in rounds alike |",
        f"|{'---|' * 6}",
    ]
    for name in _sides(cell):
        of_cut, accepted = ("", ""), ""
        if name in cell["depths"]:
            room = "–" if cell["room"][name] is None else shown(cell["room"][name])
            of_cut = shown(cell["over_best"][cut(name)]), f"{room} in {cell['alike'][name]}"
            accepted = f"{cell['accepted'][name]:.2f}"
        of_whole = f"{statistics.median(cell['tokens_per_s'][name]):.1f}", shown(cell["over_best"][name])
        lines.append(f"| {' | '.join([name, accepted, *of_whole, *of_cut])} |")
    return "\n".join(lines)


def _picture(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw each shape whole and cut, over the best fixed length."""
    figure = Figure(figsize=(4 * len(cells), 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(cells), squeeze=False)[0]
    for axis, cell in zip(axes, cells, strict=True):
        names = [GOODPUT, *cell["depths"]]
        axis.plot([cell["over_best"][name][0] for name in names], range(len(names)), "o", label="as it is")
        cuts = [cell["over_best"].get(cut(name), (math.nan,))[0] for name in names]
        axis.plot(cuts, range(len(names)), "x", label="foreseen")
        axis.set_yticks(range(len(names)), names)
        axis.axvline(1.0, color="grey", linewidth=1)
        axis.set_xlabel(f"tokens/s over {cell['best']}, batch {cell['batch']}, T = {cell['temperature']}")
        axis.legend()
    write_png(path, figure)
