"""SPIN's parts on live engines, apart and together (its Figs. 10, 12 and 13): selection, decomposition, pipelining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distillspec.recipes.rates import interval, ratios, shown
from distillspec.recipes.spin.sides import GOODPUT, Engines, Side, selecting_side
from distillspec.serving import Engine


class Part(NamedTuple):
    """A side: it selects, or gives every request the best single draft."""

    selects: bool
    attention: str
    micro_batches: int


PADDED = "masked"  # attention over rows that are padded to the longest
BASE = "base"
PARTS = {
    BASE: Part(False, PADDED, 1),
    "selection": Part(True, PADDED, 1),
    "decomposition": Part(False, "split", 1),
    "pipelining": Part(False, PADDED, 2),
    "all": Part(True, "split", 2),
    "flat": Part(True, "auto", 1),  # no part of SPIN's: selection with a kernel that reads each row's own keys
}


def part_sides(engines: Engines, drafts: Sequence[str], best: str) -> dict[str, Side]:
    """Return a side of each part. Those with the same settings share an engine.

    Args:
        drafts: folders.
        best: the best single draft.
    """
    opened = dict[tuple[str, int], Engine]()
    sides = dict[str, Side]()
    for name, (selects, attention, micro_batches) in PARTS.items():
        settings = attention, micro_batches
        if settings not in opened:
            opened[settings] = engines.open(
                drafts, proposer="draft_model", attention=attention, micro_batches=micro_batches
            )
        sides[name] = selecting_side(opened[settings], GOODPUT if selects else best)
    return sides


def parts_table(measured: Mapping[str, Any]) -> str:
    """Return the table of the parts that `Live` measured."""
    rates, best = measured["tokens_per_s"], measured["best_draft"]
    lines = [
        f"SPIN's parts live, batch {measured['batch']}; base: {best} for all, padded attention, one micro-batch",
        "",
    ]
    lines += ["| part | selection | attention | micro-batches | tokens/s over the base |", f"|{'---|' * 5}"]
    for name, part in PARTS.items():
        chosen = GOODPUT if part.selects else best
        over = shown(interval(ratios(rates, name, BASE)))
        lines.append(f"| {name} | {chosen} | {part.attention} | {part.micro_batches} | {over} |")
    return "\n".join(lines)
