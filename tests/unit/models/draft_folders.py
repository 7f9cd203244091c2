"""Folders of plain models, and draft folders as version 1 wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from distillspec.files import verify_folder, write_folder
from distillspec.models import LanguageModel, save_draft
from distillspec.models.own_weights import full_width
from distillspec.models.tiny import tiny_model


def plain_folder(target: LanguageModel, folder: Path, layers: int = 4) -> Path:
    tiny_model(target.identity.vocab_size + 5, layers=layers).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def version_1(draft: LanguageModel, folder: Path, target: LanguageModel) -> Path:
    """Save a plain draft as version 1 did: a whole Hugging Face folder, the head at full width."""
    save_draft(draft, folder, target)

    def whole(temporary: Path) -> None:
        for file in folder.iterdir():
            if file.name not in ("model.safetensors", "sha256.json"):
                (temporary / file.name).write_bytes(file.read_bytes())
        record = json.loads((folder / "distillspec.json").read_text())
        del record["embeddings"]
        (temporary / "distillspec.json").write_text(json.dumps({**record, "format_version": 1}))
        full_width(draft).save_pretrained(temporary)

    write_folder(folder, whole)
    assert verify_folder(folder) is None
    return folder
