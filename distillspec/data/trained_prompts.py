"""Keys of the prompts that a draft was trained on or chosen by (`prompt_key`), which must not evaluate it.

They stand in its lineage, with those of the drafts it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from distillspec.data.prompts import KEY_DIGITS, prompt_key
from distillspec.models import LanguageModel

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
