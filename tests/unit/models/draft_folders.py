"""Folders of plain models."""

from __future__ import annotations

from pathlib import Path

from distillspec.models import LanguageModel
from distillspec.models.tiny import tiny_model


def plain_folder(target: LanguageModel, folder: Path, layers: int = 4) -> Path:
    tiny_model(target.identity.vocab_size + 5, layers=layers).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder
