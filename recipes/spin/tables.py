"""Tables of the simulated part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distillspec.recipes.rates import shown
from distillspec.recipes.spin.kept import SETTINGS
from distillspec.recipes.spin.layouts import COUNTS
from distillspec.recipes.spin.regret import LEARNING, TRACES
from distillspec.recipes.spin.runs import PLAIN
from distillspec.recipes.spin.simulated import COMPARED, MACHINES, PARTS, REGRET, SELECTIONS, SWITCHES, TRIALS
from distillspec.recipes.spin.switches import SIDES, SWITCHING
from distillspec.recipes.spin.trials import LEARNT
from distillspec.serving.simulation import load_hardware


def tables(simulated: Mapping[str, Any]) -> str:
    """Return the tables of the figures of `Simulated.run`. The order of the JSON's keys means nothing."""
    parts = [_of_machine(name, simulated[MACHINES][name]) for name in simulated[SETTINGS]["machines"]]
    regrets = [regret_table(name, simulated[REGRET][name]) for name in TRACES]
    return "\n\n".join([*parts, _trials(simulated[TRIALS]), _switches(simulated[SWITCHES]), *regrets])


def _of_machine(machine: str, figures: Mapping[str, Any]) -> str:
    comparisons = dict(sorted(figures[COMPARED].items(), key=lambda item: int(item[0])))
    names = [PLAIN, *load_hardware(machine).latency.members, *SELECTIONS]
    lines = [f"Simulated, {machine}: tokens/s over those of the best single draft", ""]
    lines += [f"| rows | best draft | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for rows, comparison in comparisons.items():
        lines.append(f"| {rows} | {comparison['best_draft']} | {_cells(comparison['over_best'], names)} |")
    parts = ", ".join(f"{part} {figures['parts'][part]:.2f}" for part in PARTS)
    lines += ["", f"SPIN's parts over its base: {parts}", "", *_by_domain(comparisons)]
    lines += ["", *_micro_batches(figures["micro_batches"]), "", _memory(figures["memory"])]
    return "\n".join(lines)


def _by_domain(comparisons: Mapping[str, Any]) -> list[str]:
    domains = sorted(next(iter(next(iter(comparisons.values()))["by_domain"].values())))
    lines = [f"| tokens/s of a row | {' | '.join(domains)} |", f"|{'---|' * (1 + len(domains))}"]
    for rows, comparison in comparisons.items():
        for name in dict.fromkeys(["none", comparison["best_draft"], "goodput", "lbss", "oracle"]):
            cells = " | ".join(f"{comparison['by_domain'][name][domain]:.1f}" for domain in domains)
            lines.append(f"| {name}, {rows} rows | {cells} |")
    return lines


def _micro_batches(curves: Mapping[str, Any]) -> list[str]:
    counts = " | ".join(map(str, COUNTS))
    lines = [f"| tokens/s over one micro-batch; idle draft, target | {counts} |", f"|{'---|' * (1 + len(COUNTS))}"]
    for rows, drafts in sorted(curves.items(), key=lambda item: int(item[0])):
        for curve in drafts:
            first = curve[str(COUNTS[0])]["tokens_per_s"]
            cells = [
                f"{point['tokens_per_s'] / first:.2f}; {point['draft_idle']:.0%}, {point['target_idle']:.0%}"
                for point in (curve[str(count)] for count in COUNTS)
            ]
            lines.append(f"| {curve['draft']}, {rows} rows | {' | '.join(cells)} |")
    return lines


def _memory(memory: Mapping[str, Any]) -> str:
    pool, alone = memory["goodput"], memory["alone"]
    ratio = pool["tokens_per_s"] / alone["tokens_per_s"]
    return (
        f"In {memory['memory_bytes'] / 1e9:.1f} GB goodput with all drafts has room for "
        f"{pool['cache_tokens']:,} tokens and {pool['rows']:.1f} rows, and writes {ratio:.2f} times what "
        f"{memory['best_draft']} alone writes with {alone['cache_tokens']:,} tokens and {alone['rows']:.1f} rows."
    )


def _trials(trials: Mapping[str, Any]) -> str:
    ratios = {name: shown(ratio["interval"], 3) for name, ratio in trials["over"].items()}
    best = trials["best_draft"]
    return (
        f"Trials over {trials['requests']:,} requests: {trials['explored']:.2%} of the tokens were written while the "
        f"draft was on trial. That cost {trials['lost']:.2%} of tokens/s by the selection's own estimate. Measured, it "
        f"wrote {ratios[LEARNT]} times as many tokens/s as the same selection that has learnt from these requests "
        f"already and tries nothing, and {ratios[best]} times as many as {best} for all."
    )


def _switches(switches: Mapping[str, Any]) -> str:
    lines = ["Steps in which a row comes to another draft, in usual steps, and those that read ahead:", ""]
    headings = ("selection", "the draft reads", "switches", "median", "p99", "most", "reading, p99", "tokens/s")
    lines += [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for chosen in SWITCHING:
        for side in SIDES:
            figures = switches[chosen][side]
            cells = [f"{figures['switching'][name]:.2f}" for name in ("p50", "p99", "most")]
            cells = [str(figures["switching"]["steps"]), *cells, f"{figures['reading']['p99']:.2f}"]
            lines.append(
                f"| {chosen} | {side.replace('_', ' ')} | {' | '.join(cells)} | {figures['tokens_per_s']:.1f} |"
            )
    return "\n".join(lines)


def regret_table(name: str, curves: Mapping[str, Any]) -> str:
    """Return the table of one trace's curves."""
    lines = [f"Regret on {name}, in answers of the oracle:", ""]
    headings = ("selection", "seeds", "after all", "per doubling", "r² of log", "per answer", "r² of the line")
    lines += [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for chosen in LEARNING:
        regret = curves["regret"][chosen]
        log, linear = (curves["fits"][chosen][kind] for kind in ("log2", "linear"))
        slopes = f"{log['slope']:.2f} | {log['r2']:.2f} | {linear['slope']:.3f} | {linear['r2']:.2f}"
        error = f" ± {curves['two_errors'][chosen]:.1f}" if curves["seeds"][chosen] > 1 else ""
        after = f"{regret[-1]:.1f}{error} of {curves['answers'][-1]}"
        lines.append(f"| {chosen} | {curves['seeds'][chosen]} | {after} | {slopes} |")
    return "\n".join(lines)


def _cells(ratios: Mapping[str, float], names: Sequence[str]) -> str:
    return " | ".join(f"{ratios[name]:.2f}" for name in names)
