"""Targets and drafts: loading, making, saving, and checking that they belong together."""

from distillspec.models.checkpoint import load_draft, read_metadata, save_draft
from distillspec.models.draft import check_draft, initialise_draft
from distillspec.models.language_model import LanguageModel
from distillspec.models.target import load_target

__all__ = [
    "LanguageModel",
    "check_draft",
    "initialise_draft",
    "load_draft",
    "load_target",
    "read_metadata",
    "save_draft",
]
