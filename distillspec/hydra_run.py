"""Runs of a command in the folders that Hydra makes: one, several of a sweep, or one that is resumed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from distillspec.composition import key_of, register_choices, register_schema, typed
from distillspec.composition_errors import CONFIG_MODULE
from distillspec.config.removed import present_name, removed
from distillspec.errors import ConfigError, Interrupted, RunError, Terminated, is_out_of_memory
from distillspec.files import DISK_FULL, write_text

SWEEP_RECORD = "multirun.yaml"
SETTINGS = (".hydra/overrides.yaml", ".hydra/config.yaml", "config.yaml", "provenance.json")  # of a run
HOUSEKEEPING = {".hydra", "config.yaml", "provenance.json"}
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
# Sizes of batches, of training, of logits at a time, of text that is written, of a server.
SIZES = ("train.batch_tokens", "loss.chunk_tokens", "data.batch_slots", "engine.max_slots")
Command = Callable[[Any, Path], None]


def resumed_overrides(command: str, overrides: list[str]) -> tuple[list[str], Path | None]:
    """Return the overrides and the folder to run in. For `resume=FOLDER` the folder's own overrides come first."""
    resume = [word.split("=", 1)[1] for word in overrides if word.startswith("resume=")]
    if not resume or resume[-1] in ("", "null"):
        return overrides, None
    folder = Path(resume[-1].strip("'\"")).expanduser()
    saved = folder / ".hydra" / "overrides.yaml"
    if not saved.is_file():
        raise ConfigError(f"resume={folder} is not a run folder of distill {command}: it has no .hydra/overrides.yaml")
    earlier = [_renamed(command, str(word)) for word in OmegaConf.load(saved)]
    new = [word for word in overrides if not word.startswith("resume=")]
    # A run that was begun with a setting removed since goes on without it.
    kept = [word for word in earlier if not word.startswith("resume=") and removed(command, key_of(word)) is None]
    return [*kept, *new, f"resume={_quoted(folder)}"], folder


def _renamed(command: str, word: str) -> str:
    """Return the override by the name that its setting has now."""
    key = key_of(word)
    return word.replace(key, present_name(command, key), 1)


def run_with_hydra(command: str, overrides: list[str], run: Command, folder: Path | None) -> int:
    """Let Hydra make the run folder (or several, for `-m`) and call `run(config, folder)` in each.

    Hydra would print a traceback for an error of ours. So errors are kept, and the first one is raised here after the
    other runs of a sweep. Settings that `run` refuses leave no folder.
    """
    import transformers  # takes a second: mistakes in settings are reported before

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
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failures.append(RunError(_out_of_memory(command, config, output)))
        except Interrupted as stop:
            failures.append(stop)
            raise KeyboardInterrupt from stop
        except KeyboardInterrupt as stop:
            number = stop.signal_number if isinstance(stop, Terminated) else signal.SIGINT
            hint = f"distill {command} resume={shlex.quote(_from_here(output))}"
            failures.append(Interrupted(number, hint) if hasattr(config, "resume") else stop)
            raise

    register_schema(command)
    register_choices()
    used = _used_before(overrides)
    here = [] if folder is None else [f"hydra.run.dir={_quoted(folder)}"]
    with _as_arguments([*overrides, *here]), _unchanged_if_refused(used if folder is None else [folder], failures):
        try:
            hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=command)(task)()
        except OSError as error:
            raise RunError(f"{error.strerror or error}: {error.filename or 'the run folder'}") from error
        except KeyboardInterrupt:
            if not failures:
                raise
        finally:
            for output in refused if folder is None else ():
                if not any(output.is_relative_to(each) for each in used):
                    _discard_untouched(output)
    if failures:
        raise failures[0]
    return 0


def _out_of_memory(command: str, config: Any, output: Path) -> str:
    """Return the line for a run that found no memory, with the settings to lower."""
    known = OmegaConf.structured(config)
    other = "engine.max_slots" if OmegaConf.select(known, "data.generator") == "slots" else "data.batch_slots"
    settings = [name for name in SIZES if name != other and _has(known, name)]
    lower = f"; lower {', '.join(settings)}" if settings else ""
    goes_on = f", and continue with distill {command} resume={shlex.quote(_from_here(output))}"
    return f"out of memory{lower}{goes_on if hasattr(config, 'resume') else ''}"


def _has(settings: Any, name: str) -> bool:
    return OmegaConf.select(settings, name, default=settings) is not settings


@contextmanager
def _as_arguments(overrides: list[str]) -> Iterator[None]:
    """Give Hydra its arguments in `sys.argv`, and have it raise errors in place of printing them."""
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
def _unchanged_if_refused(folders: Sequence[Path], failures: list[BaseException]) -> Iterator[None]:
    """Restore the settings that runs in these folders were begun with, if the new ones are refused."""
    files = [folder / name for folder in folders for name in SETTINGS]
    before = {file: file.read_text() for file in files if file.is_file()}
    yield
    if any(isinstance(error, ConfigError) for error in failures):
        for file, text in before.items():
            write_text(file, text)


def _used_before(overrides: list[str]) -> list[Path]:
    """Return the folders named for runs that hold something already: another run's, or a server's that is running."""
    named = [value for key, _, value in (word.partition("=") for word in overrides) if key in FOLDERS]
    folders = [Path(value.strip("'\"")).absolute() for value in named]
    return [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]


def _discard_untouched(output: Path) -> None:
    """Remove a run folder without results, and the folders above that are empty then.

    Hydra's record of a sweep is removed with the sweep's last run.
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
    """Return a path quoted for Hydra: sweep folders have = and , in their names."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
