"""Tables of the live part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distillspec.recipes.rates import best_on_odd, interval, ratios, shown
from distillspec.recipes.spin.idle import idle_table
from distillspec.recipes.spin.live import ALONE
from distillspec.recipes.spin.sides import BESIDE, GOODPUT, LOOKUP, NONE, OURS

ByRound = Mapping[str, Sequence[float]]  # side → tokens a second of each round


def live_table(batch: str, found: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return the tables of one batch."""
    parts = [_sides(batch, found, drafts), _goals(batch, found, drafts)]
    return "\n\n".join([*parts, "\n".join(idle_table(found["idle"], (NONE, *drafts, GOODPUT)))])


def best_draft(found: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return the best single draft by its median over rounds 1, 3, …. It is compared on all of them."""
    return best_on_odd(found["tokens_per_s"], drafts)


def best_by_domain(found: Mapping[str, Any], drafts: Sequence[str]) -> float:
    """Return the tokens/s of the best draft for each domain, over those of the best single draft, by medians."""
    best = best_draft(found, drafts)
    own = [_median(found, best, domain) for domain in found["by_domain"][best]]
    each = [max(_median(found, name, domain) for name in drafts) for domain in found["by_domain"][best]]
    return statistics.harmonic_mean(each) / statistics.harmonic_mean(own)


def rates_alone(found: Mapping[str, Any]) -> dict[str, ByRound]:
    """Return by domain the tokens a second of each side, where nothing else is asked at the same time.

    With one slot that is so in mixed rounds too. With more slots there are rounds of each domain alone, or none.
    """
    if ALONE in found:
        return dict(found[ALONE])
    by_side = found["by_domain"]
    return {domain: {name: own[domain] for name, own in by_side.items()} for domain in by_side[NONE]}


def _sides(batch: str, found: Mapping[str, Any], drafts: Sequence[str]) -> str:
    rates, best = found["tokens_per_s"], best_draft(found, drafts)
    beside = best_draft(found, [f"{name}{BESIDE}" for name in drafts])
    domains = sorted(found["by_domain"][NONE])
    lines = [f"Batch {batch}, tokens/s, and those of a row by domain; best single draft: {best}, ", ""]
    lines[0] += f"beside n-grams: {beside}"
    lines += [
        f"| drafts by | tokens/s | × none | × {best} | × {beside} | {' | '.join(domains)} |",
        f"|{'---|' * (5 + len(domains))}",
    ]
    if len(domains) > 1:
        kinds = {domain: max(drafts, key=lambda name: _median(found, name, domain)) for domain in domains}
        named = ", ".join(f"{name} for {domain}" for domain, name in kinds.items())
        lines[0] += f"; best of each domain ({named}): {best_by_domain(found, drafts):.2f} times {best}"
    for name, own in rates.items():
        over = [shown(interval(ratios(rates, name, other))) for other in (NONE, best, beside)]
        cells = [f"{_median(found, name, domain):.1f}" for domain in domains]
        lines.append(f"| {name} | {statistics.median(own):.1f} | {' | '.join(over)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _goals(batch: str, found: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return goodput over the best single draft of each domain, and over prompt lookup else a draft."""
    if int(batch) > 1 and ALONE not in found:
        return f"Batch {batch}: no rounds of one domain alone."
    alone = rates_alone(found)
    best = {domain: best_on_odd(rates, drafts) for domain, rates in alone.items()}
    lines = [f"Batch {batch}, one domain alone", ""]
    headings = [f"{domain} ({best[domain]})" for domain in sorted(alone)]
    lines += [f"| tokens/s over those of | {' | '.join(headings)} |", f"|{'---|' * (1 + len(alone))}"]
    for name in OURS:
        for other in ("the best draft there", LOOKUP):
            cells = [
                shown(interval(ratios(alone[domain], name, best[domain] if other != LOOKUP else LOOKUP)))
                for domain in sorted(alone)
            ]
            lines.append(f"| {name} over {other} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _median(found: Mapping[str, Any], name: str, domain: str) -> float:
    """Return the tokens a second of a side's row on a domain."""
    return statistics.median(found["by_domain"][name][domain])
