"""Held-out prompts that no draft was trained on or chosen by: those that may judge it."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.config import DraftConfig
from distillspec.data.prompts import prompt_key
from distillspec.data.trained_prompts import trained_prompts
from distillspec.errors import ConfigError
from distillspec.models import read_metadata
from distillspec.models.checkpoint import draft_folder
from distillspec.types import Prompt


def known_before(config: DraftConfig) -> frozenset[str]:
    """Return the keys of the prompts that the draft a run starts from was trained on or chosen by."""
    folder = draft_folder(str(config.path)) if config.kind == "pretrained" else None
    return frozenset() if folder is None else trained_prompts(read_metadata(folder).get("lineage", {}))


def unseen(prompts: Sequence[Prompt], trained: frozenset[str]) -> list[Prompt]:
    """Return the held-out prompts that no draft was trained on or chosen by. Print the number left out.

    Raises:
        ConfigError: none is left.
    """
    left = [p for p in prompts if prompt_key(p.token_ids) not in trained]
    if prompts and not left:
        raise ConfigError(
            "a draft was trained on or chosen by all held-out prompts; give others with data.prompts or data.cache"
        )
    if len(left) < len(prompts):
        print(f"left out {len(prompts) - len(left)} held-out prompts: a draft was trained on or chosen by them")
    return left
