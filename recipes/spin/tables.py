"""Tables of the simulated part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distillspec.recipes.spin.layouts import COUNTS
from distillspec.recipes.spin.simulated import PROVENANCE, REGRET, TRIALS


def machines_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of each machine."""
    return {name: own for name, own in found.items() if name not in (TRIALS, REGRET, PROVENANCE)}


def by_rows(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a machine's comparisons of selections, by rows."""
    return {rows: compared for rows, compared in own.items() if rows.isdigit()}


def tables(found: Mapping[str, Any]) -> str:
    """Return the tables of what `Simulated.run` found."""
    parts = [_of_machine(name, own) for name, own in machines_of(found).items()]
    trials = found[TRIALS][""]
    line = (
        f"Trials over {trials['requests']:,} requests: {trials['explored']:.1%} of the tokens were written while the "
        f"draft was on trial, and trials cost {trials['lost']:.1%} of tokens/s."
    )
    return "\n\n".join([*parts, line, *(_of_trace(name, own) for name, own in found[REGRET][""].items())])


def _of_machine(machine: str, own: Mapping[str, Any]) -> str:
    compared = by_rows(own)
    names = list(next(iter(compared.values()))["tokens_per_s"])
    lines = [f"Simulated, {machine}: tokens/s over those of the best single draft", ""]
    lines += [f"| rows | best draft | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for rows, found in compared.items():
        lines.append(f"| {rows} | {found['best_draft']} | {_cells(found['over_best'], names)} |")
    parts = ", ".join(f"{part} {gain:.2f}" for part, gain in own["parts"].items())
    lines += ["", f"SPIN's parts over its base: {parts}", "", *_by_domain(compared)]
    lines += ["", *_micro_batches(own["micro_batches"]), "", _memory(own["memory"])]
    return "\n".join(lines)


def _by_domain(compared: Mapping[str, Any]) -> list[str]:
    domains = sorted(next(iter(next(iter(compared.values()))["by_domain"].values())))
    lines = [f"| tokens/s of a row | {' | '.join(domains)} |", f"|{'---|' * (1 + len(domains))}"]
    for rows, found in compared.items():
        for name in dict.fromkeys(["none", found["best_draft"], "goodput", "lbss", "oracle"]):
            cells = " | ".join(f"{found['by_domain'][name][domain]:.1f}" for domain in domains)
            lines.append(f"| {name}, {rows} rows | {cells} |")
    return lines


def _micro_batches(curves: Mapping[str, Any]) -> list[str]:
    counts = " | ".join(map(str, COUNTS))
    lines = [f"| tokens/s over one micro-batch; idle draft, target | {counts} |", f"|{'---|' * (1 + len(COUNTS))}"]
    for rows, drafts in curves.items():
        for own in drafts:
            first = own[str(COUNTS[0])]["tokens_per_s"]
            cells = [
                f"{each['tokens_per_s'] / first:.2f}; {each['draft_idle']:.0%}, {each['target_idle']:.0%}"
                for each in (own[str(count)] for count in COUNTS)
            ]
            lines.append(f"| {own['draft']}, {rows} rows | {' | '.join(cells)} |")
    return lines


def _memory(found: Mapping[str, Any]) -> str:
    pool, alone = found["goodput"], found["alone"]
    over = pool["tokens_per_s"] / alone["tokens_per_s"]
    return (
        f"In {found['memory_bytes'] / 1e9:.1f} GB goodput with all drafts has room for "
        f"{pool['cache_tokens']:,} tokens and {pool['rows']:.1f} rows, and writes {over:.2f} times what "
        f"{found['best_draft']} alone writes with {alone['cache_tokens']:,} tokens and {alone['rows']:.1f} rows."
    )


def _of_trace(name: str, own: Mapping[str, Any]) -> str:
    lines = [f"Regret on {name}, in answers of the oracle:", ""]
    lines += ["| selection | after all | per doubling | r² of log | per answer | r² of the line |", f"|{'---|' * 6}"]
    for chosen, regret in own["regret"].items():
        log, linear = (own["fits"][chosen][kind] for kind in ("log2", "linear"))
        slopes = f"{log['slope']:.2f} | {log['r2']:.2f} | {linear['slope']:.3f} | {linear['r2']:.2f}"
        lines.append(f"| {chosen} | {regret[-1]:.1f} of {own['answers'][-1]} | {slopes} |")
    return "\n".join(lines)


def _cells(found: Mapping[str, float], names: Sequence[str]) -> str:
    return " | ".join(f"{found[name]:.2f}" for name in names)
