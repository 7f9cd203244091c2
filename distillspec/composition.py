"""From words on the command line to one checked, typed config; every mistake is one line."""

from __future__ import annotations

import difflib
import importlib
import itertools
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import transformers
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distillspec.config import COMMANDS
from distillspec.errors import ConfigError, Interrupted, RunError, Terminated
from distillspec.files import DISK_FULL

CONFIG_MODULE = "distillspec.conf"
Command = Callable[[Any, Path], None]


def register_schemas() -> None:
    """Put every command's typed schema where the YAML files' defaults lists find it."""
    store = ConfigStore.instance()
    for command, schema in COMMANDS.items():
        store.store(name=f"{command}_schema", node=schema)


def compose(command: str, overrides: list[str]) -> Any:
    """The command's typed config for plain overrides (no sweep, no flags).

    Raises:
        ConfigError: an unknown key or option, a wrong type, or an impossible value.
    """
    register_schemas()
    plain = [word for word in overrides if not word.startswith(("-", "hydra."))]
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            composed = hydra.compose(config_name=command, overrides=plain)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(command, error)) from error
    return typed(composed)


def typed(composed: DictConfig) -> Any:
    """The dataclass instance behind a composed config; its `__post_init__` checks run here."""
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def expand_sweep(overrides: list[str]) -> Iterator[list[str]]:
    """The override lists of the single runs that `-m` makes of these (just the one without `-m`)."""
    if not {"-m", "--multirun"} & set(overrides):
        yield overrides
        return
    words = [word for word in overrides if not word.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    choices = []
    for word, override in zip(words, parsed, strict=True):
        key = override.get_key_element()
        sweep = override.is_sweep_override()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if sweep else [word])
    yield from (list(combination) for combination in itertools.product(*choices))


def resumed_overrides(command: str, overrides: list[str]) -> tuple[list[str], Path | None]:
    """For `resume=FOLDER`: the folder's own overrides before the new ones, and the folder to run in."""
    resume = [word.split("=", 1)[1] for word in overrides if word.startswith("resume=")]
    if not resume or resume[-1] in ("", "null"):
        return overrides, None
    folder = Path(resume[-1]).expanduser()
    saved = folder / ".hydra" / "overrides.yaml"
    if not saved.is_file():
        raise ConfigError(f"resume={folder} is not a run folder of distill {command}: it has no .hydra/overrides.yaml")
    earlier = [str(word) for word in OmegaConf.load(saved)]
    new = [word for word in overrides if not word.startswith("resume=")]
    kept = [word for word in earlier if not word.startswith("resume=")]
    return [*kept, *new, f"resume={folder}"], folder


def run_with_hydra(command: str, overrides: list[str], run: Command, folder: Path | None) -> int:
    """Let Hydra make the run folder (or several, for `-m`) and call `run(config, folder)` in each.

    Errors travel around Hydra, which would print a traceback; the first one is raised again here, after the
    other runs of a sweep have had their turn.
    """
    transformers.utils.logging.disable_progress_bar()
    failures: list[BaseException] = []

    def task(composed: DictConfig) -> None:
        output = Path(HydraConfig.get().runtime.output_dir)
        try:
            run(typed(composed), output)
            print(f"results: {_from_here(output)}")
        except (ConfigError, RunError) as error:
            failures.append(error)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            failures.append(RunError(f"the disk is full: could not write {error.filename or output}"))
        except Interrupted as stop:
            failures.append(stop)
            raise KeyboardInterrupt from stop
        except KeyboardInterrupt as stop:
            number = stop.signal_number if isinstance(stop, Terminated) else signal.SIGINT
            failures.append(Interrupted(number, f"distill {command} resume={_from_here(output)}"))
            raise

    register_schemas()
    here = [] if folder is None else [f"hydra.run.dir={folder}"]
    before = sys.argv
    sys.argv = ["distill", *overrides, *here]
    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=command)(task)()
    except KeyboardInterrupt:
        if not failures:
            raise
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
    return 0


def _one_line(command: str, error: Exception) -> str:
    """What Hydra or OmegaConf says over several lines, as one that names the key and the fix."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(command, match[1])
    if match := re.search(r"Key '([^']+)' is not in struct", text):
        full = re.search(r"full_key: (\S+)", text)
        return _unknown_key(command, full[1] if full else match[1])
    if match := re.search(r"Could not find '([^']+)'", text):
        group, _, option = match[1].rpartition("/")
        options = _options(group)
        if options:
            return f"{group}={option} is not known; use one of {', '.join(options)}"
    if match := re.search(r"Could not override '([^']+)'|in override '([^']+)'", text):
        return f"cannot read the override {match[1] or match[2]!r}"
    cause = error.__cause__
    lines = [line.strip() for line in f"{text}\n{cause or ''}".splitlines() if line.strip()]
    key = next((line.split(": ", 1)[1] for line in lines if line.startswith("full_key:")), None)
    said = next((line for line in lines if line.startswith(("Value", "Invalid", "Cannot"))), lines[0])
    return f"{key}: {said}" if key else said


def _unknown_key(command: str, key: str) -> str:
    """A misspelt key with the nearest real one."""
    known = list(_keys(OmegaConf.structured(COMMANDS[command])))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"see distill {command} --help"
    return f"unknown setting {key}; {hint}"


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in config:
        key = f"{prefix}{name!s}"
        yield key
        child = config._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _keys(child, f"{key}.")


def _options(group: str) -> list[str]:
    """The YAML files of a config group."""
    root = Path(next(iter(importlib.import_module(CONFIG_MODULE).__path__)))
    return sorted(path.stem for path in (root / group).glob("*.yaml")) if group else []


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
