"""Loading a draft for an engine, and the checks it must pass first."""

from __future__ import annotations

from pathlib import Path

import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained


def load_draft(path: str | Path, target: LanguageModel) -> LanguageModel:
    """Load a draft in the target's dtype and onto its device.

    Raises:
        ConfigError: the folder is no model, or its tokenizer is not the target's.
    """
    return load_pretrained(str(path), target, target.dtype)


def version_of(draft: LanguageModel | None) -> str:
    """Return the draft's short weights hash, "" without a draft."""
    return "" if draft is None else draft.identity.version


def check_finite(draft: LanguageModel) -> None:
    """Refuse a draft with NaN or infinite weights.

    Raises:
        ConfigError: the line names the first such parameter.
    """
    for name, parameter in draft.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ConfigError(
                f"the draft {draft.name} has NaN or infinite weights ({name}); train or export it again "
                "(the old draft stays)"
            )
