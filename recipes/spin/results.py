"""Tables and picture of the study."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillspec.files import write_json, write_text
from distillspec.provenance import provenance
from distillspec.recipes.rates import best_on_odd, interval, ratios, shown
from distillspec.recipes.spin.idle import idle_table
from distillspec.recipes.spin.live import BESIDE, GOODPUT, NONE
from distillspec.recipes.spin.pictures import draw_live, draw_simulated
from distillspec.recipes.spin.tables import tables


def write_results(root: Path, live: Mapping[str, Any], simulated: dict[str, Any], drafts: Sequence[str]) -> str:
    """Write `results.json`, `results.md`, `simulated.png` and, of live runs, `spin.png` under the root.

    Return the tables.
    """
    write_json(
        root / "results.json",
        {"live": live, "simulated": simulated, "drafts": list(drafts), "provenance": provenance([], 0)},
    )
    text = "\n\n".join([*(_live_table(batch, found, drafts) for batch, found in live.items()), tables(simulated)])
    write_text(root / "results.md", text + "\n")
    draw_simulated(simulated, root / "simulated.png")
    if live:
        best = {batch: best_draft(found, drafts) for batch, found in live.items()}
        draw_live(live, best, root / "spin.png")
    return text


def best_draft(found: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return the best single draft by its median over rounds 1, 3, …. It is compared on all of them."""
    return best_on_odd(found["tokens_per_s"], drafts)


def best_by_domain(found: Mapping[str, Any], drafts: Sequence[str]) -> float:
    """Return the tokens/s of the best draft for each domain, over those of the best single draft, by medians."""
    rates, best = found["by_domain"], best_draft(found, drafts)
    each = [max(rates[name][domain] for name in drafts) for domain in rates[best]]
    return statistics.harmonic_mean(each) / statistics.harmonic_mean(list(rates[best].values()))


def _live_table(batch: str, found: Mapping[str, Any], drafts: Sequence[str]) -> str:
    rates, best = found["tokens_per_s"], best_draft(found, drafts)
    beside = best_draft(found, [f"{name}{BESIDE}" for name in drafts])
    domains = sorted(next(iter(found["by_domain"].values())))
    lines = [f"Batch {batch}, tokens/s; best single draft: {best}, beside n-grams: {beside}", ""]
    lines += [
        f"| drafts by | tokens/s | × none | × {best} | × {beside} | {' | '.join(domains)} |",
        f"|{'---|' * (5 + len(domains))}",
    ]
    if len(domains) > 1:
        kinds = {domain: max(drafts, key=lambda name: found["by_domain"][name][domain]) for domain in domains}
        named = ", ".join(f"{name} for {domain}" for domain, name in kinds.items())
        lines[0] += f"; best of each domain ({named}): {best_by_domain(found, drafts):.2f} times {best}"
    for name, own in rates.items():
        over = [shown(interval(ratios(rates, name, other))) for other in (NONE, best, beside)]
        cells = [f"{found['by_domain'][name][domain]:.1f}" for domain in domains]
        lines.append(f"| {name} | {statistics.median(own):.1f} | {' | '.join(over)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *idle_table(found["idle"], (NONE, *drafts, GOODPUT))])
