"""Arguments that several studies take."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection
from pathlib import Path


def add_common(parser: ArgumentParser, output: str) -> None:
    """Add the prompts, the folder of the results, the target and further settings."""
    parser.add_argument("--prompts", required=True, help="JSON, JSONL, CSV or Parquet with a prompt column")
    parser.add_argument("--output", default=output, help="where everything goes")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("words", nargs="*", help="further settings of every run")


def check_prompts(parser: ArgumentParser, prompts: str, option: str = "--prompts") -> None:
    """End the program with exit code 2 if there is no file of prompts."""
    if not Path(prompts).is_file():
        parser.error(f"{option} {prompts}: no such file")


def names_of(parser: ArgumentParser, option: str, names: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names in "A,B", each once. End the program with exit code 2 if one is not known."""
    named = tuple(dict.fromkeys(names.split(",")))
    if unknown := [name for name in named if name not in known]:
        parser.error(f"{option} {unknown[0]} is not known; use some of {', '.join(known)}")
    return named
