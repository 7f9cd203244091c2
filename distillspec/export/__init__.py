"""Drafts for other programs: folders that vLLM, SGLang and plain transformers load."""

from distillspec.export.draft import export_draft
from distillspec.export.result import ExportResult

__all__ = ["ExportResult", "export_draft"]
