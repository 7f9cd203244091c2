"""Reports about runs: one self-contained HTML page that a person would send to a colleague."""

from distillspec.report.page import write_report

__all__ = ["write_report"]
