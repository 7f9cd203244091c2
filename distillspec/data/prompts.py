"""Prompts from files and the Hub, rendered with the target's chat template, split once and for all."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distillspec.config import DataConfig
from distillspec.data.chat import render_prompt
from distillspec.errors import ConfigError
from distillspec.types import Prompt

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and prompts held out; no id is in both."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped_long: int = 0


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PromptSet:
    """Read `data.prompts` (a file or a Hub dataset) and split it.

    Raises:
        ConfigError: no such file, dataset or column, or too few prompts to hold some out.
    """
    rows = read_rows(config)
    prompts = _distinct([_prompt(row, number, config, tokenizer) for number, row in enumerate(rows)])
    fitting = [p for p in prompts if 0 < len(p.token_ids) <= config.max_prompt_tokens]
    return split_prompts(fitting, config, seed, dropped_long=len(prompts) - len(fitting))


def split_prompts(prompts: Sequence[Prompt], config: DataConfig, seed: int, dropped_long: int = 0) -> PromptSet:
    """Shuffle by seed; the first `data.eval_prompts` are held out whatever `data.num_prompts` is."""
    unique = list({p.token_ids: p for p in prompts}.values())
    if len(unique) <= config.eval_prompts:
        raise ConfigError(
            f"data.prompts={config.prompts} gives {len(unique)} usable prompts, not more than "
            f"data.eval_prompts={config.eval_prompts} to hold out; lower data.eval_prompts or add prompts"
        )
    random.Random(seed).shuffle(unique)
    held_out, train = unique[: config.eval_prompts], unique[config.eval_prompts :]
    return PromptSet(tuple(train[: config.num_prompts]), tuple(held_out), dropped_long)


def read_rows(config: DataConfig) -> list[dict[str, Any]]:
    """The dataset's rows, checked to have the columns the config names."""
    import datasets

    datasets.disable_progress_bars()
    path = Path(config.prompts).expanduser()
    kind = FILE_KINDS.get(path.suffix.lower())
    check_prompts(config)
    try:
        if kind is not None:
            dataset = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            dataset = datasets.load_dataset(config.prompts, split=config.split)
    except Exception as error:  # datasets raises a type of its own for each way a source can be unreadable
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"data.prompts={config.prompts} cannot be read: {reason}; give selfprompt, a JSON, JSONL, CSV or "
            "Parquet file, or a Hub dataset id"
        ) from error
    _require_column(dataset.column_names, config.prompt_field, "data.prompt_field")
    if config.uses_fixed_responses:
        _require_column(dataset.column_names, config.response_field, "data.response_field")
    return list(dataset)


def check_prompts(config: DataConfig) -> None:
    """Raise ConfigError for a prompt file that does not exist; what the Hub has is not asked."""
    path = Path(config.prompts).expanduser()
    if path.suffix.lower() in FILE_KINDS and not path.is_file():
        raise ConfigError(f"data.prompts={config.prompts}: no such file")


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from values that name a piece of work, the same in every process and run."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def texts(prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Prompts as a person reads them."""
    return [tokenizer.decode(list(p.token_ids), skip_special_tokens=True) for p in prompts]


def _prompt(row: dict[str, Any], number: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    content, given = row[config.prompt_field], row.get("id")
    where = f"data.prompt_field={config.prompt_field}: row {number}"
    if not isinstance(content, (str, list)):
        raise ConfigError(f"{where} is {type(content).__name__}, not text or messages")
    if isinstance(content, list) and not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in content):
        raise ConfigError(f"{where} is not a list of messages with role and content")
    return Prompt(
        id=str(number if given is None else given),
        token_ids=render_prompt(tokenizer, content),
        domain=str(row.get(config.domain_field) or "default"),
        response=_response(row, number, config),
    )


def _response(row: dict[str, Any], number: int, config: DataConfig) -> str | None:
    """The row's response as text; numbers are answers too (a CSV column of sums is read as integers)."""
    value = row.get(config.response_field)
    if value is None or value == "":
        return None
    if isinstance(value, (str, int, float)):
        return str(value)
    if not config.uses_fixed_responses:
        return None
    raise ConfigError(f"data.response_field={config.response_field}: row {number} is {type(value).__name__}, not text")


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with ids that name only one each: samples are found again by them."""
    seen: dict[str, int] = {}
    named = []
    for prompt in prompts:
        seen[prompt.id] = seen.get(prompt.id, 0) + 1
        repeat = seen[prompt.id]
        named.append(prompt if repeat == 1 else replace(prompt, id=f"{prompt.id}#{repeat}"))
    return named


def _require_column(names: Sequence[str], wanted: str, key: str) -> None:
    if wanted not in names:
        raise ConfigError(f"{key}={wanted} is not a column of the data; it has {', '.join(names)}")
