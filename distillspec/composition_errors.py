"""Hydra's and OmegaConf's errors, which have several lines, as one line with the key and the fix."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from distillspec.config import COMMANDS
from distillspec.config.registry import GROUPS
from distillspec.config.removed import removed

CONFIG_MODULE = "distillspec.conf"


def one_line(command: str, error: Exception) -> str:
    """Return one line for an error of Hydra or OmegaConf."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(command, match[1])
    if match := re.search(r"Key '([^']+)' is not in struct", text):
        full = re.search(r"full_key: (\S+)", text)
        return unknown_key(command, full[1] if full else match[1])
    if match := re.search(r"field '([^']+)' is not Optional", str(error.__cause__)):
        return f"{match[1]}=null is not possible; give a value, or leave it out for the default"
    if match := re.search(r"Could not find '([^']+)'", text):
        group, _, option = match[1].partition("/")
        if options_of(group):
            return unknown_option(command, group, option)
    if match := re.search(r"Could not override '([^']+)'|in override '([^']+)'", text):
        return f"cannot read the override {match[1] or match[2]!r}"
    cause = error.__cause__
    lines = [line.strip() for line in f"{text}\n{cause or ''}".splitlines() if line.strip()]
    key = next((line.split(": ", 1)[1] for line in lines if line.startswith("full_key:")), None)
    said = next((line for line in lines if line.startswith(("Value", "Invalid", "Cannot"))), lines[0])
    return f"{key}: {said}" if key else said


def unknown_key(command: str, key: str) -> str:
    """Name a misspelt key and the nearest real one."""
    if command == "eval" and key.partition(".")[0] == "draft":
        return f"unknown setting {key}; distill eval judges finished drafts: drafts=[FOLDER, FOLDER]"
    known = [name for name in keys_of(OmegaConf.structured(COMMANDS[command])) if removed(command, name) is None]
    if below := [name for name in known if name.startswith(f"{key}.")]:
        path = f"{key}.path"
        return f"{key} has settings of its own; did you mean {path if path in below else below[0]}?"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"see distill {command} --help"
    return f"unknown setting {key}; {hint}"


def unknown_option(command: str, group: str, option: str) -> str:
    """Name the choices of a group, and the setting for a folder if it was given one."""
    line = f"{group}={option} is not known; use one of {', '.join(options_of(group))}"
    takes_path = f"{group}.path" in keys_of(OmegaConf.structured(COMMANDS[command]))
    return f"{line}, or {group}.path={option}" if takes_path and "/" in option else line


def keys_of(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in config:
        key = f"{prefix}{name!s}"
        yield key
        child = config._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from keys_of(child, f"{key}.")


def options_of(group: str) -> list[str]:
    """Return the choices of a config group, including those without a YAML file."""
    table = GROUPS[group][1] if group in GROUPS else {}
    return sorted({*yaml_options(group), *table})


def yaml_options(group: str) -> list[str]:
    """Return the names of a config group's YAML files."""
    return [path.stem for path in (conf_folder() / group).glob("*.yaml")] if group else []


def conf_folder() -> Path:
    """Return the folder of the YAML files."""
    return Path(next(iter(importlib.import_module(CONFIG_MODULE).__path__)))
