"""`distill COMMAND [overrides]`: compose, check, run. Nothing is written before the settings are right."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from distillspec import __version__
from distillspec.composition import compose, expand_sweep, naming_combination, with_home
from distillspec.config import COMMANDS, BenchCommand, EngineConfig
from distillspec.config.unused import check_unused
from distillspec.errors import ConfigError, Interrupted, RunError, Terminated
from distillspec.files import private_files
from distillspec.helptext import command_help, general_help
from distillspec.hydra_run import resumed_overrides, run_with_hydra
from distillspec.training.leaving import leaving_at_once

if TYPE_CHECKING:
    from distillspec.evaluation.cost import StepCost
    from distillspec.evaluation.measured import Decoders, Decoding
    from distillspec.models import LanguageModel
    from distillspec.types import Generator, StateRequest

OF_THE_ENGINE_HERE = (
    *("engine=", "engine.", "target=", "target.", "draft.", "drafts="),
    *("bench.policies=", "bench.selections=", "bench.longest_prompt="),
)
HELP_FLAGS = {"-h", "--help", "help"}
HELP_ALL = "--help=all"
# in distillspec.serving.commands
ENGINE_COMMANDS = {"adapt", "bench", "profile", "quality", "replay", "serve", "simulate", "train-stop", "versions"}
HOLDING_TEXT = {"adapt", "replay", "serve", "versions"}  # files with other people's text are for this account alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad configuration, 130/143 interrupted."""
    if argv is None:
        gc.disable()  # imports make a million objects that stay, and it would look at them again and again
        return leaving_at_once(lambda: main(sys.argv[1:]))
    # Where DeepSpeed is installed, other libraries import it, and without a GPU it warns that it found none.
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _dispatch(list(argv))
    except ConfigError as error:
        return _fail(str(error), 2)
    except RunError as error:
        return _fail(str(error), 1)
    except Interrupted as stop:
        return _fail(f"interrupted, state saved; continue with: {stop}", 128 + stop.signal_number)
    except KeyboardInterrupt as stop:
        return _fail("interrupted", 143 if isinstance(stop, Terminated) else 130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {*HELP_FLAGS, HELP_ALL}:
        print(general_help())
        return 0
    if words[0] in {"--version", "-V"}:
        print(f"distillspec {__version__}")
        return 0
    command, overrides = words[0], words[1:]
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}; use one of {', '.join(COMMANDS)} (distill --help)")
    if {*HELP_FLAGS, HELP_ALL} & set(overrides):
        print(command_help(command, everything=HELP_ALL in overrides))
        return 0
    return _run(command, overrides)


def _run(command: str, overrides: list[str]) -> int:
    """Check every run the overrides describe, then let Hydra make the folders and run them."""
    overrides = typed = [with_home(word) for word in overrides]
    overrides, folder = resumed_overrides(command, overrides)
    for single in expand_sweep(overrides):
        # A resumed run keeps what it was begun with: earlier versions took settings that this one refuses.
        with naming_combination(single, overrides):
            _check(compose(command, single), single, single if folder is None else typed)
    package = "distillspec.serving.commands" if command in ENGINE_COMMANDS else "distillspec.commands"
    module = importlib.import_module(f"{package}.{command.replace('-', '_')}")

    def run(config: Any, folder: Path) -> None:
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        if hasattr(config, "engine"):
            _connect_engine(config.engine if isinstance(config.engine, EngineConfig) else config.engine.settings)
        module.run(config, folder)

    with private_files() if command in HOLDING_TEXT else nullcontext():
        return run_with_hydra(command, overrides, run, folder)


def _check(config: Any, overrides: Sequence[str], typed: Sequence[str]) -> None:
    _check_engine(config, overrides)
    check_unused(config, typed)


def _check_engine(config: Any, overrides: Sequence[str]) -> None:
    """Refuse settings of an engine that would not be made."""
    words = [word.lstrip("+") for word in overrides]
    typed = [word for word in words if word.startswith(("engine=", "engine."))]
    if typed and hasattr(config, "data") and config.data.generator != "engine":
        raise ConfigError(f"{typed[0]} needs data.generator=engine: data.generator={config.data.generator} samples")
    if isinstance(config, BenchCommand) and config.urls:
        own = [word for word in words if word.startswith(OF_THE_ENGINE_HERE)]
        if own:
            raise ConfigError(f"{own[0]} has no effect with url=, which drives servers as they are; leave it out")


def _connect_engine(settings: EngineConfig) -> None:
    """Register the serving engine, which only this module may import: `data.generator=engine`, costs and speed-ups."""
    from distillspec.evaluation.cost import COSTS
    from distillspec.evaluation.measured import DECODERS
    from distillspec.generation import GENERATORS

    def engine_generator(
        writer: LanguageModel, slots: int, source: str, draft: LanguageModel | None, states: StateRequest
    ) -> Generator:
        from distillspec.serving.generator import EngineGenerator

        return EngineGenerator(writer, settings, source=source, draft=draft)

    def engine_decoders(draft: LanguageModel, target: LanguageModel, how: Decoding) -> AbstractContextManager[Decoders]:
        from distillspec.serving.speedup import engine_decoders as decoders

        return decoders(draft, target, how)

    def engine_costs(
        draft: LanguageModel, target: LanguageModel, batches: Sequence[int], longest: int
    ) -> dict[int, StepCost]:
        from distillspec.serving.speedup import engine_costs as costs

        return costs(draft, target, batches, longest)

    COSTS["engine"] = engine_costs
    GENERATORS["engine"] = engine_generator
    DECODERS["engine"] = engine_decoders


def _fail(line: str, code: int) -> int:
    print(f"distill: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
