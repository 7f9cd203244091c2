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


def live_table(batch: str, figures: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return the tables of one batch."""
    parts = [_sides(batch, figures, drafts), _goals(batch, figures, drafts)]
    return "\n\n".join([*parts, "\n".join(idle_table(figures["idle"], (NONE, *drafts, GOODPUT)))])


def best_draft(figures: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return the best single draft by its median over rounds 1, 3, …. It is compared on all of them."""
    return best_on_odd(figures["tokens_per_s"], drafts)


def best_by_domain(figures: Mapping[str, Any], drafts: Sequence[str]) -> float:
    """Return the tokens/s of the best draft for each domain, over those of the best single draft, by medians."""
    best = best_draft(figures, drafts)
    rates_of_best = [_median(figures, best, domain) for domain in figures["by_domain"][best]]
    best_rates = [max(_median(figures, name, domain) for name in drafts) for domain in figures["by_domain"][best]]
    return statistics.harmonic_mean(best_rates) / statistics.harmonic_mean(rates_of_best)


def rates_alone(figures: Mapping[str, Any]) -> dict[str, ByRound]:
    """Return by domain the tokens a second of each side while it answers that domain alone.

    With one slot mixed rounds count too, since answers are written one by one. With more slots only rounds of one
    domain count, if there are any.
    """
    if ALONE in figures:
        return dict(figures[ALONE])
    by_side = figures["by_domain"]
    return {domain: {name: by_domain[domain] for name, by_domain in by_side.items()} for domain in by_side[NONE]}


def _sides(batch: str, figures: Mapping[str, Any], drafts: Sequence[str]) -> str:
    rates, best = figures["tokens_per_s"], best_draft(figures, drafts)
    beside = best_draft(figures, [f"{name}{BESIDE}" for name in drafts])
    domains = sorted(figures["by_domain"][NONE])
    title = (
        f"Batch {batch}, tokens/s, and those of a row by domain; best single draft: {best}, beside n-grams: {beside}"
    )
    lines = [
        title,
        "",
        f"| drafts by | tokens/s | × none | × {best} | × {beside} | {' | '.join(domains)} |",
        f"|{'---|' * (5 + len(domains))}",
    ]
    if len(domains) > 1:
        best_of_domain = {domain: max(drafts, key=lambda name: _median(figures, name, domain)) for domain in domains}
        best_names = ", ".join(f"{name} for {domain}" for domain, name in best_of_domain.items())
        lines[0] += f"; best of each domain ({best_names}): {best_by_domain(figures, drafts):.2f} times {best}"
    for name, side_rates in rates.items():
        over = [shown(interval(ratios(rates, name, other))) for other in (NONE, best, beside)]
        cells = [f"{_median(figures, name, domain):.1f}" for domain in domains]
        lines.append(f"| {name} | {statistics.median(side_rates):.1f} | {' | '.join(over)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _goals(batch: str, figures: Mapping[str, Any], drafts: Sequence[str]) -> str:
    """Return goodput over the best single draft of each domain, and over prompt lookup else a draft."""
    if int(batch) > 1 and ALONE not in figures:
        return f"Batch {batch}: no rounds of one domain alone."
    alone = rates_alone(figures)
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


def _median(figures: Mapping[str, Any], name: str, domain: str) -> float:
    """Return the tokens a second of a side's row on a domain."""
    return statistics.median(figures["by_domain"][name][domain])
