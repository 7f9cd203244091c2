"""Prompts that a draft was trained on or chosen by, which must not evaluate it.

A trained draft records their keys (`prompt_key`) in its lineage, with those of the drafts it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distillspec.config import DraftConfig
from distillspec.data.prompts import KEY_DIGITS, prompt_key
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, read_metadata
from distillspec.models.checkpoint import draft_folder
from distillspec.types import Prompt

# All keys joined into one string: as a list, each would take a line of the metadata file.
TRAINED = "trained_prompts"


def with_trained_prompts(draft: LanguageModel, prompts: Iterable[Iterable[int]]) -> LanguageModel:
    """Return the draft with `prompts` (token ids) recorded as those that train it or choose its best checkpoint."""
    keys = trained_prompts(draft.lineage) | {prompt_key(ids) for ids in prompts}
    return replace(draft, lineage={**draft.lineage, TRAINED: "".join(sorted(keys))})


def trained_prompts(lineage: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of the prompts that a draft of this lineage was trained on or chosen by."""
    word = str(lineage.get(TRAINED, ""))
    return frozenset(word[i : i + KEY_DIGITS] for i in range(0, len(word), KEY_DIGITS))


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
