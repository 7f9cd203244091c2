"""The report: one HTML file with styles and charts inside, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from distillspec import __version__
from distillspec.files import write_text
from distillspec.report.facts import caveats, what_was_run
from distillspec.report.headline import comparison, headline
from distillspec.report.runs import ReportEntry, Run, entries_of, read_runs
from distillspec.report.sections import (
    acceptance,
    acceptance_by_position,
    block_efficiency,
    cost_table,
    speed_ups,
    training,
)
from distillspec.report.words import policy_text

TEMPLATE = Path(__file__).with_name("template.html")


def write_report(runs: Sequence[Path], output: Path, title: str = "Distilling a draft") -> Path:
    """Write one self-contained page about train and eval runs. Return `output`.

    Raises:
        ConfigError: a run folder is missing, unfinished or unreadable.
        RunError: the disk is full or read-only.
    """
    read = read_runs(runs)
    write_text(output, render(read, entries_of(read), title))
    return output


def render(runs: Sequence[Run], entries: Sequence[ReportEntry], title: str) -> str:
    """Return the page's HTML. Sections without content are left out."""
    accepted = [acceptance(entries), acceptance_by_position(entries)]
    efficiency = [*accepted, block_efficiency(entries), *speed_ups(entries)]
    sections = [
        ("", headline(entries)),
        ("Training", training(runs)),
        ("Acceptance and speed", _pair(efficiency) + comparison(entries)),
        ("Cost", cost_table(entries)),
        ("What was run", what_was_run(runs)),
        ("Before quoting these numbers", _list(caveats(runs, entries))),
    ]
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(_subtitle(runs, entries)),
        body="\n".join(_section(heading, content) for heading, content in sections if content),
        footer=f"Made by distillspec {escape(__version__)}.",
    )


def _subtitle(runs: Sequence[Run], entries: Sequence[ReportEntry]) -> str:
    results = [entry.result for entry in entries]
    prompts = max((int(result.get("prompts") or 0) for result in results), default=0)
    positions = max((int(result.get("positions") or 0) for result in results), default=0)
    started = sorted(str(run.provenance["started"])[:10] for run in runs if run.provenance.get("started"))
    parts = [
        started[0] if started else "",
        f"{prompts:,} held-out prompts" if prompts else "",
        f"{positions:,} token positions" if positions else "",
        policy_text(results[0].get("policy")),
    ]
    return " · ".join(filter(None, parts))


def _pair(figures: Sequence[str]) -> str:
    return f'<div class="pair">{"".join(figures)}</div>'


def _section(heading: str, content: str) -> str:
    return f"<section>{f'<h2>{heading}</h2>' if heading else ''}{content}</section>"


def _list(lines: Sequence[str]) -> str:
    return f'<ul class="caveats">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""
