"""From words on the command line to one checked, typed config; every mistake is one line."""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import transformers
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distillspec.config import COMMANDS
from distillspec.errors import ConfigError, Interrupted, RunError, Terminated
from distillspec.files import DISK_FULL, write_text

CONFIG_MODULE = "distillspec.conf"
SWEEP_FLAGS = {"-m", "--multirun"}
SWEEP_RECORD = "multirun.yaml"
HOUSEKEEPING = {".hydra", "config.yaml", "provenance.json"}
Command = Callable[[Any, Path], None]


@functools.cache
def register_schemas() -> None:
    """Put every command's typed schema where the YAML files' defaults lists find it.

    `distill_name` makes a sweep's overrides a folder name that needs no quoting anywhere.
    """
    OmegaConf.register_new_resolver(
        "distill_name", lambda text: re.sub(r"[^\w.+-]+", "_", text)[:80].strip("_"), replace=True
    )
    store = ConfigStore.instance()
    for command, schema in COMMANDS.items():
        store.store(name=f"{command}_schema", node=schema)


def compose(command: str, overrides: list[str]) -> Any:
    """The command's typed config for plain overrides (no sweep, no flags).

    Raises:
        ConfigError: an unknown key or option, a wrong type, or an impossible value.
    """
    register_schemas()
    plain = [word for word in overrides if word not in SWEEP_FLAGS]
    for word in plain:
        _parse(word)
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            # With Hydra's own settings, so that a mistake in one of them is found here too.
            composed = hydra.compose(config_name=command, overrides=plain, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(command, error)) from error
    with open_dict(composed):
        del composed["hydra"]
    unknown = sorted(map(str, set(composed) - set(_keys(OmegaConf.structured(COMMANDS[command])))))
    if unknown:
        raise ConfigError(_unknown_key(command, unknown[0]))
    return typed(composed)


def typed(composed: DictConfig) -> Any:
    """The dataclass instance behind a composed config; its `__post_init__` checks run here."""
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def expand_sweep(overrides: list[str]) -> Iterator[list[str]]:
    """The override lists of the single runs that `-m` makes of these (just the one without `-m`)."""
    if not SWEEP_FLAGS & set(overrides):
        yield overrides
        return
    choices = [_choices(word) for word in overrides if word not in SWEEP_FLAGS]
    yield from (list(combination) for combination in itertools.product(*choices))


def _choices(word: str) -> list[str]:
    """The plain overrides that one word of a sweep stands for."""
    override = _parse(word)
    if not override.is_sweep_override():
        return [word]
    key = override.get_key_element()
    value: Any = override.value()
    if isinstance(value, Glob):
        return [f"{key}={name}" for name in value.filter(_options(key))]
    return [f"{key}={text}" for text in override.sweep_string_iterator()]


def _parse(word: str) -> Override:
    if word.startswith("-"):
        raise ConfigError(f"unknown flag {word}; settings are key=value, and -m makes a sweep (distill --help)")
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"cannot read {word!r}; settings are key=value, as in draft.layers=4") from error


def resumed_overrides(command: str, overrides: list[str]) -> tuple[list[str], Path | None]:
    """For `resume=FOLDER`: the folder's own overrides before the new ones, and the folder to run in."""
    resume = [word.split("=", 1)[1] for word in overrides if word.startswith("resume=")]
    if not resume or resume[-1] in ("", "null"):
        return overrides, None
    folder = Path(resume[-1].strip("'\"")).expanduser()
    saved = folder / ".hydra" / "overrides.yaml"
    if not saved.is_file():
        raise ConfigError(f"resume={folder} is not a run folder of distill {command}: it has no .hydra/overrides.yaml")
    earlier = [str(word) for word in OmegaConf.load(saved)]
    new = [word for word in overrides if not word.startswith("resume=")]
    kept = [word for word in earlier if not word.startswith("resume=")]
    return [*kept, *new, f"resume={_quoted(folder)}"], folder


def run_with_hydra(command: str, overrides: list[str], run: Command, folder: Path | None) -> int:
    """Let Hydra make the run folder (or several, for `-m`) and call `run(config, folder)` in each.

    Errors travel around Hydra, which would print a traceback; the first one is raised again here, after the
    other runs of a sweep have had their turn. Settings refused by `run` leave no folder behind.
    """
    transformers.utils.logging.disable_progress_bar()
    failures: list[BaseException] = []
    refused: list[Path] = []

    def task(composed: DictConfig) -> None:
        output = Path(HydraConfig.get().runtime.output_dir)
        config = typed(composed)
        try:
            run(config, output)
            print(f"results: {_from_here(output)}")
        except ConfigError as error:
            failures.append(error)
            refused.append(output)
        except RunError as error:
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
            hint = f"distill {command} resume={shlex.quote(_from_here(output))}"
            failures.append(Interrupted(number, hint) if hasattr(config, "resume") else stop)
            raise

    register_schemas()
    here = [] if folder is None else [f"hydra.run.dir={_quoted(folder)}"]
    with _as_arguments([*overrides, *here]), _unchanged_if_refused(folder, failures):
        try:
            hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=command)(task)()
        except OSError as error:
            raise RunError(f"{error.strerror or error}: {error.filename or 'the run folder'}") from error
        except KeyboardInterrupt:
            if not failures:
                raise
        finally:
            for output in refused if folder is None else ():
                _discard_untouched(output)
    if failures:
        raise failures[0]
    return 0


@contextmanager
def _as_arguments(overrides: list[str]) -> Iterator[None]:
    """What Hydra reads from the process: its arguments, and that errors are ours to report."""
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["distill", *overrides], "1"
    try:
        yield
    finally:
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _unchanged_if_refused(folder: Path | None, failures: list[BaseException]) -> Iterator[None]:
    """Keep a resumed run's overrides as they were when the new ones turn out to be impossible."""
    saved = None if folder is None else folder / ".hydra" / "overrides.yaml"
    before = None if saved is None else saved.read_text()
    yield
    if saved is not None and before is not None and any(isinstance(error, ConfigError) for error in failures):
        write_text(saved, before)


def _discard_untouched(output: Path) -> None:
    """Remove a run folder that holds no work yet, and the folders above it that are empty then.

    Hydra's record of a sweep counts as nothing once no run of the sweep is left beside it.
    """
    if not output.is_dir():
        return
    files = [path.relative_to(output) for path in output.rglob("*") if path.is_file()]
    if all(path.parts[0] in HOUSEKEEPING or path.suffix == ".log" for path in files):
        shutil.rmtree(output, ignore_errors=True)
        if [path.name for path in output.parent.iterdir()] == [SWEEP_RECORD]:
            (output.parent / SWEEP_RECORD).unlink()
        for parent in output.parents:
            if not parent.is_relative_to(Path.cwd()) or parent == Path.cwd() or any(parent.iterdir()):
                break
            parent.rmdir()


def _quoted(path: Path) -> str:
    """A path as Hydra reads it whatever is in it: sweep folders have = and , in their names."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _one_line(command: str, error: Exception) -> str:
    """What Hydra or OmegaConf says over several lines, as one that names the key and the fix."""
    text = str(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(command, match[1])
    if match := re.search(r"Key '([^']+)' is not in struct", text):
        full = re.search(r"full_key: (\S+)", text)
        return _unknown_key(command, full[1] if full else match[1])
    if match := re.search(r"field '([^']+)' is not Optional", str(error.__cause__)):
        return f"{match[1]}=null is not possible; give a value, or leave it out for the default"
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
