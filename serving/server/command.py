"""`distill serve`: load, listen, serve until a signal."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path

from distillspec.commands.eval import find_draft
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ServeCommand
from distillspec.errors import Terminated
from distillspec.serving.engine import Engine
from distillspec.serving.server.app import create_app
from distillspec.serving.server.catalogue import open_folder
from distillspec.serving.server.keys import load_admin_key, load_api_keys
from distillspec.serving.server.listening import DrainingServer, bind, check_exposure, url_of
from distillspec.serving.server.logs import set_up_logging
from distillspec.serving.server.parts import Parts, make_parts


def run(config: ServeCommand, folder: Path) -> None:
    """Writes `summary.json` when the server ends. Keys and address are checked before the models are loaded.

    Raises:
        ConfigError: see `load_api_keys`, `check_exposure`, `bind` and `Engine.from_pretrained`.
        KeyboardInterrupt: answers were cut off at the end (`Terminated` for SIGTERM).
    """
    keys, admin = load_api_keys(config.server), load_admin_key(config.server)
    check_exposure(config.server, bool(keys))
    draft = None if config.draft.path is None else find_draft(config.draft.path)
    with bind(config.server) as bound:
        set_up_logging(config.server.log_format)
        engine = Engine.from_pretrained(
            config.target.path,
            draft,
            dtype=config.target.dtype,
            device=config.target.device,
            **dataclasses.asdict(config.engine),
        )
        catalogue = None
        if config.server.drafts_folder is not None:
            catalogue = open_folder(engine, config.server.drafts_folder, draft)
        parts = make_parts(config.server, engine, keys=keys, admin=admin, catalogue=catalogue)
        open_run(folder, config)
        print(greeting(url_of(bound, config.server), parts), flush=True)
        began = time.monotonic()
        server = DrainingServer(create_app(parts), parts)
        server.run(sockets=[bound])
    engine.close()
    telemetry = parts.telemetry
    close_run(
        folder,
        "serve",
        {
            "seconds": time.monotonic() - began,
            "requests": telemetry.requests,
            "tokens": telemetry.tokens,
            "answers_cut_off": server.lost,
            "acceptance": telemetry.state()["acceptance"],
        },
    )
    if server.lost:
        raise Terminated if server.signal_number == Terminated.signal_number else KeyboardInterrupt


def greeting(url: str, parts: Parts) -> str:
    """Where it is, and a line to try it with."""
    body = f'{{"model": "{parts.model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    key = ' -H "Authorization: Bearer $KEY"' if parts.keys else ""
    return (
        f"{parts.model} at {url}/v1, dashboard at {url}/, stop with Ctrl-C; try:\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
