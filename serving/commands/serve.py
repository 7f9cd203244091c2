"""`distill serve`: load, listen, serve until a signal."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from contextlib import closing
from pathlib import Path

from distillspec.commands.eval import find_draft
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ServeCommand
from distillspec.errors import ConfigError, Terminated
from distillspec.serving.engine import Engine

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(config: ServeCommand, folder: Path) -> None:
    """Writes `summary.json` when the server ends. Keys and address are checked before the models are loaded.

    Raises:
        ConfigError: a setting is impossible, the port is taken, or the extra `serve` is not installed.
        KeyboardInterrupt: answers were cut off at the end (`Terminated` for SIGTERM).
    """
    _check_installed()
    from distillspec.serving.server.app import create_app
    from distillspec.serving.server.catalogue import open_folder
    from distillspec.serving.server.greeting import greeting
    from distillspec.serving.server.keys import load_admin_key, load_api_keys
    from distillspec.serving.server.listening import DrainingServer, bind, check_exposure, url_of
    from distillspec.serving.server.logs import logging_to_stderr
    from distillspec.serving.server.parts import make_parts

    settings = config.server
    keys, admin = load_api_keys(settings), load_admin_key(settings)
    check_exposure(settings, bool(keys))
    draft = None if config.draft.path is None else find_draft(config.draft.path)
    with (
        bind(settings) as bound,
        logging_to_stderr(settings.log_format),
        closing(_load_engine(config, draft)) as engine,
    ):
        root = settings.drafts_folder
        catalogue = None if root is None else open_folder(engine, root, draft)
        parts = make_parts(settings, engine, keys=keys, admin=admin, catalogue=catalogue)
        open_run(folder, config)
        print(greeting(url_of(bound, settings), parts), flush=True)
        began = time.monotonic()
        server = DrainingServer(create_app(parts), parts)
        server.run(sockets=[bound])
    summary = {"seconds": time.monotonic() - began, "answers_cut_off": server.lost, **parts.telemetry.state()}
    close_run(folder, "serve", summary)
    if server.lost:
        raise Terminated if server.signal_number == Terminated.signal_number else KeyboardInterrupt


def _load_engine(config: ServeCommand, draft: Path | None) -> Engine:
    target, settings = config.target, dataclasses.asdict(config.engine)
    return Engine.from_pretrained(target.path, draft, dtype=target.dtype, device=target.device, **settings)


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"distill serve needs {', '.join(missing)}: pip install 'distillspec[serve]'")
