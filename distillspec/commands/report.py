"""`distill report`: one self-contained HTML page about runs."""

from __future__ import annotations

from pathlib import Path

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ReportCommand
from distillspec.report import write_report


def run(config: ReportCommand, folder: Path) -> None:
    """Write `folder/report.html`."""
    open_run(folder, config)
    page = write_report([Path(run) for run in config.runs], folder / "report.html", config.title)
    print(f"report: {page}")
    close_run(folder, "report", {"report": str(page), "runs": list(config.runs)})
