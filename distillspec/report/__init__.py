"""Reports about runs, each one self-contained HTML page."""

from distillspec.report.page import write_report

__all__ = ["write_report"]
