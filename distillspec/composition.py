"""Words on the command line → one checked, typed config. Every mistake is one line."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distillspec.composition_errors import (
    CONFIG_MODULE,
    keys_of,
    one_line,
    options_of,
    unknown_key,
    unknown_option,
    yaml_options,
)
from distillspec.config import COMMANDS
from distillspec.config.registry import GROUPS
from distillspec.config.removed import removed
from distillspec.errors import ConfigError

SWEEP_FLAGS = {"-m", "--multirun"}


def register_schema(command: str) -> None:
    """Register a command's typed schema, and no other's, under the name that the YAML file's defaults list uses.

    Hydra copies all that is registered at every composition. `distill_name` makes a sweep's overrides a folder name
    that needs no quoting anywhere.
    """
    OmegaConf.register_new_resolver(
        "distill_name", lambda text: re.sub(r"[^\w.+-]+", "_", text)[:80].strip("_"), replace=True
    )
    store = ConfigStore.instance()
    for other in COMMANDS:
        store.repo.pop(f"{other}_schema.yaml", None)
    store.store(name=f"{command}_schema", node=_structured(command))


@functools.cache
def _structured(command: str) -> DictConfig:
    return OmegaConf.structured(COMMANDS[command])


def register_choices() -> None:
    """Offer `loss=NAME` and `draft=NAME` for the choices of the tables that have no YAML file."""
    store = ConfigStore.instance()
    for group, (key, table) in GROUPS.items():
        files = yaml_options(group)
        for name in table:
            if name not in files:
                store.store(group=group, name=name, node={key: name})


def compose(command: str, overrides: list[str]) -> Any:
    """Return the command's typed config for plain overrides (no sweep, no flags).

    Raises:
        ConfigError: an unknown key or option, a wrong type, or an impossible value.
    """
    register_schema(command)
    register_choices()
    plain = [word for word in overrides if word not in SWEEP_FLAGS]
    for word in plain:
        _parse(word)
        _refuse_unknown(command, word)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            # With Hydra's own settings, so that a mistake in one of them is found here too.
            composed = hydra.compose(config_name=command, overrides=plain, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(command, error)) from error
        except ValueError as error:  # Hydra's own, of a group that is given no name
            given = [word for word in plain if yaml_options(key_of(word)) and not isinstance(_parse(word).value(), str)]
            raise ConfigError(unknown_option(command, *given[0].split("=", 1)) if given else str(error)) from error
    with open_dict(composed):
        del composed["hydra"]
    unknown = sorted(map(str, set(composed) - set(keys_of(_structured(command)))))
    if unknown:
        raise ConfigError(unknown_key(command, unknown[0]))
    return typed(composed)


def typed(composed: DictConfig) -> Any:
    """Return the dataclass instance of a composed config. Its `__post_init__` checks run here."""
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def expand_sweep(overrides: list[str]) -> Iterator[list[str]]:
    """Yield the overrides of each run that `-m` makes of these. Without `-m` there is one run."""
    if not SWEEP_FLAGS & set(overrides):
        yield overrides
        return
    choices = [_choices(word) for word in overrides if word not in SWEEP_FLAGS]
    yield from (list(combination) for combination in itertools.product(*choices))


@contextmanager
def naming_combination(single: Sequence[str], overrides: Sequence[str]) -> Iterator[None]:
    """Let an error about one run of a sweep begin with the values that the sweep gave it."""
    try:
        yield
    except ConfigError as error:
        varied = [word for word in single if word not in overrides]
        raise ConfigError(f"in {' '.join(varied)}: {error}") if varied else error from None


def _choices(word: str) -> list[str]:
    """Return the plain overrides that one word of a sweep expands to."""
    override = _parse(word)
    if not override.is_sweep_override():
        return [word]
    key = override.get_key_element()
    value: Any = override.value()
    if isinstance(value, Glob):
        return [f"{key}={name}" for name in value.filter(options_of(key))]
    return [f"{key}={text}" for text in override.sweep_string_iterator()]


def key_of(word: str) -> str:
    """Return the setting that an override gives: `loss.beta` for `+loss.beta=.3`."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _refuse_unknown(command: str, word: str) -> None:
    """Raise ConfigError for a removed setting, and for `+KEY=…` with a key that no config has.

    Hydra adds such a key, and nothing would read it.
    """
    key = key_of(word)
    if line := removed(command, key):
        raise ConfigError(line)
    if not word.startswith("+") or key.startswith("hydra") or yaml_options(key):
        return
    node: Any = _structured(command)
    for part in key.split("."):
        if not isinstance(node, DictConfig) or OmegaConf.get_type(node) is dict:
            return  # below a mapping with keys of the user's
        if part not in node:
            raise ConfigError(unknown_key(command, key))
        node = node._get_node(part)


def with_home(word: str) -> str:
    """Return an override with paths that begin with ~ under the home folder: no shell does that behind KEY=."""
    key, sign, value = word.partition("=")
    return key + sign + re.sub(r"(^|(?<=[\[,'\"]))~(?=/)", lambda _: str(Path.home()), value)


def _parse(word: str) -> Override:
    if word.startswith("-"):
        raise ConfigError(f"unknown flag {word}; settings are key=value, and -m makes a sweep (distill --help)")
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"cannot read {word!r}; settings are key=value, as in draft.layers=4") from error
