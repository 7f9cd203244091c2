"""Prompts of a file that no draft was trained on, for studies that ask engines."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from distillspec.config import DataConfig
from distillspec.data.chat import render_prompt
from distillspec.data.prompts import prompt_key, read_rows
from distillspec.data.trained_prompts import trained_prompts
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel


def unseen_prompts(
    file: str | Path, target: LanguageModel, drafts: Iterable[LanguageModel], count: int, longest: int
) -> list[tuple[int, ...]]:
    """Return the first `count` prompts of at most `longest` tokens that no draft was trained on.

    Raises:
        ConfigError: the file has fewer.
    """
    seen = frozenset[str]().union(*(trained_prompts(draft.lineage) for draft in drafts))
    texts = (render_prompt(target.text_tokenizer, row["prompt"]) for row in read_rows(DataConfig(prompts=str(file))))
    unseen = (ids for ids in texts if len(ids) <= longest and prompt_key(ids) not in seen)
    prompts = list(islice(unseen, count))
    if len(prompts) < count:
        raise ConfigError(f"{file} has {len(prompts)} short prompts that no draft has seen, not {count}")
    return prompts
