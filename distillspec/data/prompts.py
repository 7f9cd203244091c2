"""Prompts from files and the Hub, rendered with the target's chat template and split by their own hash."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distillspec.config import DataConfig
from distillspec.data.chat import TemplateRefused, render_prompt
from distillspec.errors import ConfigError
from distillspec.types import Prompt

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
RESERVED = 0.05  # the share of all possible prompts that is never trained on
KEY_DIGITS = 12
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class PromptSet:
    """Prompts to train on and prompts held out. No id is in both."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped_long: int = 0


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, avoid: Collection[str] = frozenset()
) -> PromptSet:
    """Read `data.prompts` (a file or a Hub dataset) and split it as `split_prompts` does.

    Rows are read in a random order, the same each time, and no more of them than the split needs.

    Raises:
        ConfigError: no such file, dataset or column, or too few prompts to hold some out.
    """
    long = 0

    def fitting() -> Iterator[Prompt]:
        nonlocal long
        for prompt in read_prompts(config, tokenizer, shuffled=True):
            if 0 < len(prompt.token_ids) <= config.max_prompt_tokens:
                yield prompt
            else:
                long += 1

    split = split_prompts(fitting(), config, avoid)
    return replace(split, dropped_long=long)


def split_prompts(
    prompts: Iterable[Prompt],
    config: DataConfig,
    avoid: Collection[str] = frozenset(),
    reserved: float = RESERVED,
) -> PromptSet:
    """Hold out `data.eval_prompts` and train on the next `data.num_prompts`, as each prompt's own hash decides.

    The prompts whose hash is among the lowest `reserved` share are never trained on, so another seed, number of prompts
    or part of the file does not test on them. If they are too few, the ones with the next hashes are held out too.

    Args:
        avoid: `prompt_key`s of prompts that must not be held out: a draft was trained on them.

    Raises:
        ConfigError: too few prompts to hold some out, or all are in `avoid`.
    """
    seen: dict[tuple[tuple[int, ...], str | None], Prompt] = {}  # a prompt's responses are samples of their own
    train, held_out, tested = list[Prompt](), list[Prompt](), set[tuple[int, ...]]()
    for prompt in prompts:
        key = prompt.token_ids, prompt.response if config.uses_fixed_responses else None
        if key in seen:
            continue
        seen[key] = prompt
        if _split_position(prompt) >= reserved:
            train.append(prompt)
        elif prompt_key(prompt.token_ids) not in avoid and prompt.token_ids not in tested:
            held_out.append(prompt)
            tested.add(prompt.token_ids)
        enough = config.num_prompts is not None and len(train) >= config.num_prompts
        if enough and len(held_out) >= config.eval_prompts:
            break
    different = len({token_ids for token_ids, _ in seen})
    if different <= config.eval_prompts:
        raise ConfigError(
            f"data.prompts={config.prompts} gives {different} usable prompts, not more than "
            f"data.eval_prompts={config.eval_prompts} to hold out; lower data.eval_prompts or add prompts"
        )
    missing = config.eval_prompts - len(held_out)
    if missing > 0:
        others = {p.token_ids: p for p in train if prompt_key(p.token_ids) not in avoid}
        held_out += sorted(others.values(), key=_split_position)[:missing]
    if not held_out:
        raise ConfigError(
            f"a draft was trained on or chosen by all prompts of data.prompts={config.prompts}; none is left to hold "
            "out; add prompts or give others"
        )
    held_out = held_out[: config.eval_prompts]
    tested = {p.token_ids for p in held_out}
    train = [p for p in train if p.token_ids not in tested] or [p for p in seen.values() if p.token_ids not in tested]
    return PromptSet(tuple(train[: config.num_prompts]), tuple(held_out))


def prompt_key(token_ids: Iterable[int]) -> str:
    """Return twelve hexadecimal digits that identify a prompt by its tokens, whatever its id is."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:KEY_DIGITS]


def _split_position(prompt: Prompt) -> float:
    """Return a number in [0, 1) that depends on the prompt's tokens alone."""
    return int(prompt_key(prompt.token_ids), 16) / 16**KEY_DIGITS


def read_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, shuffled: bool = False) -> Iterator[Prompt]:
    """Yield the prompts of `data.prompts`, of any length, with distinct ids. Reads a few hundred rows at a time.

    Raises:
        ConfigError: no such file, dataset or column, or a row that is no prompt.
    """
    dataset = read_rows(config)
    order = list(range(len(dataset)))
    if shuffled:
        random.Random(0).shuffle(order)
    seen: dict[str, int] = {}
    for start in range(0, len(order), ROWS_AT_ONCE):
        numbers = order[start : start + ROWS_AT_ONCE]
        columns = dataset[numbers]
        rows = {n: {name: values[i] for name, values in columns.items()} for i, n in enumerate(numbers)}
        # In the file's order, so that the first row that is no prompt is the one that an error names.
        prompts = {n: make_prompt(rows[n], n, config, tokenizer) for n in sorted(numbers)}
        yield from (_distinct(prompts[n], seen) for n in numbers)


def read_rows(config: DataConfig, key: str = "data.prompts") -> Any:
    """Return the dataset, checked to have the columns that the config names. Its rows stay on disk.

    Args:
        key: the setting that names the file, where it is not `data.prompts`.

    Raises:
        ConfigError: it cannot be read, or lacks a column.
    """
    import datasets

    datasets.disable_progress_bars()
    path = Path(config.prompts).expanduser()
    kind = FILE_KINDS.get(path.suffix.lower())
    check_prompts(config, key)
    try:
        if kind is not None:
            dataset = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            dataset = datasets.load_dataset(config.prompts, split=config.split)
    except Exception as error:  # datasets raises a type of its own for each way a source can be unreadable
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{key}={config.prompts} cannot be read: {reason}; give "
            f"{'selfprompt, ' if key == 'data.prompts' else ''}a JSON, JSONL, CSV or Parquet file, or a Hub dataset id"
        ) from error
    if key != "data.prompts" and config.prompt_field not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        raise ConfigError(f"{key}={config.prompts} has no column {config.prompt_field}; it has {columns}")
    _require_column(dataset.column_names, config.prompt_field, "data.prompt_field")
    if config.uses_fixed_responses:
        _require_column(dataset.column_names, config.response_field, "data.response_field")
    return dataset


def check_prompts(config: DataConfig, key: str = "data.prompts") -> None:
    """Raise ConfigError for a prompt file that does not exist. Does not contact the Hub."""
    path = Path(config.prompts).expanduser()
    if path.suffix.lower() in FILE_KINDS and not path.is_file():
        raise ConfigError(f"{key}={config.prompts}: no such file")


def stable_seed(*parts: object) -> int:
    """Return a 63-bit seed made of values that name a piece of work, the same in every process and run."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_prompt(row: dict[str, Any], number: int, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return a row's prompt: a text, or messages without the assistant's last ones, which the target is to write.

    Raises:
        ConfigError: the row is no prompt, or not one of the target's chat template.
    """
    content, given = row[config.prompt_field], row.get("id")
    where = f"data.prompt_field={config.prompt_field}: row {number}"
    check_content(content, where)
    try:
        token_ids = render_prompt(tokenizer, content if isinstance(content, str) else _unanswered(content, where))
    except TemplateRefused as refused:
        raise ConfigError(f"{where} does not fit the target's chat template: {refused.reason}") from refused
    return Prompt(
        id=str(number if given is None else given),
        token_ids=token_ids,
        domain=str(row.get(config.domain_field) or "default"),
        response=_response(row, number, config),
    )


def _unanswered(messages: Sequence[dict[str, str]], where: str) -> Sequence[dict[str, str]]:
    """Return messages up to the last one that is not the assistant's."""
    ends = [end for end, message in enumerate(messages, 1) if message["role"] != "assistant"]
    if not ends:
        raise ConfigError(f"{where} has messages of the assistant alone; add the user's before them")
    return messages[: ends[-1]]


def check_content(content: Any, where: str) -> None:
    """Raise ConfigError for a prompt that is neither a text nor a list of messages. `where` it is begins the line."""
    if not isinstance(content, (str, list)):
        raise ConfigError(f"{where} is {type(content).__name__}, not text or messages")
    if content == []:
        raise ConfigError(f"{where} has no messages; give a text, or the user's messages")
    messages = content if isinstance(content, list) else []
    if not all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in messages):
        raise ConfigError(f"{where} is not a list of messages with role and content, both of them text")


def response_text(value: Any) -> str | None:
    """Return a response as text, None for none or another type.

    Numbers are answers too: a CSV column of sums is read as integers.
    """
    return str(value) if isinstance(value, (str, int, float)) and value != "" else None


def _response(row: dict[str, Any], number: int, config: DataConfig) -> str | None:
    value = row.get(config.response_field)
    if value is None or isinstance(value, (str, int, float)) or not config.uses_fixed_responses:
        return response_text(value)
    raise ConfigError(f"data.response_field={config.response_field}: row {number} is {type(value).__name__}, not text")


def _distinct(prompt: Prompt, seen: dict[str, int]) -> Prompt:
    """Return the prompt with an id of its own, by which its samples are found. `seen` counts ids so far."""
    seen[prompt.id] = seen.get(prompt.id, 0) + 1
    repeat = seen[prompt.id]
    return prompt if repeat == 1 else replace(prompt, id=f"{prompt.id}#{repeat}")


def _require_column(names: Sequence[str], column: str, key: str) -> None:
    if column not in names:
        raise ConfigError(f"{key}={column} is not a column of the data; it has {', '.join(names)}")
