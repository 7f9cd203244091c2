"""`distill serve`: load, listen, serve until a signal; with `online`, learn from what is served."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distillspec.commands.eval import find_draft
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ServeCommand
from distillspec.errors import ConfigError, Terminated
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.serving.engine import Engine
from distillspec.serving.threads import in_own_thread

if TYPE_CHECKING:
    from distillspec.serving.online.adaptation import Adaptation
    from distillspec.serving.online.layout import OnlineSettings
    from distillspec.serving.server.parts import Parts

log = logging.getLogger(__name__)

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(config: ServeCommand, folder: Path) -> None:
    """Writes `summary.json` when the server ends. Keys, address and folders are checked before models are loaded.

    Raises:
        ConfigError: a setting is impossible, the port is taken, or the extra `serve` is not installed.
        RunError: another server trains in `online.folder`, or it cannot be written.
        KeyboardInterrupt: answers were cut off at the end (`Terminated` for SIGTERM).
    """
    _check_installed()
    from distillspec.serving.server.app import create_app
    from distillspec.serving.server.greeting import greeting
    from distillspec.serving.server.keys import load_admin_key, load_api_keys
    from distillspec.serving.server.listening import DrainingServer, bind, check_exposure, url_of
    from distillspec.serving.server.logs import logging_to_stderr
    from distillspec.serving.server.parts import make_parts

    keys, admin = load_api_keys(config.server), load_admin_key(config.server)
    check_exposure(config.server, bool(keys))
    draft = None if config.draft.path is None else find_draft(config.draft.path)
    online = _online_settings(config, draft)
    parts: Parts
    with (
        bind(config.server) as bound,
        logging_to_stderr(config.server.log_format),
        closing(in_own_thread(lambda: _load_engine(config, draft, online))) as engine,
    ):
        learns = online is not None and engine.core.proposer is not None
        adaptation = _adaptation(engine, online, lambda: parts.bridge.thread.wake()) if online and learns else None
        extra = _drafts_and_control(config, engine, draft, adaptation)
        parts = make_parts(config.server, engine, keys=keys, admin=admin, **extra)
        with adaptation or nullcontext():
            open_run(folder, config)
            print(greeting(url_of(bound, config.server), parts), flush=True)
            began = time.monotonic()
            server = DrainingServer(create_app(parts), parts)
            server.run(sockets=[bound])
            summary = _summary(parts, server.lost, time.monotonic() - began)
    close_run(folder, "serve", summary)
    if server.lost:
        raise Terminated if server.signal_number == Terminated.signal_number else KeyboardInterrupt


def _online_settings(config: ServeCommand, draft: Path | None) -> OnlineSettings | None:
    if config.online.mode == "off":
        return None
    from distillspec.serving.online.beginning import check_beginning, load_redaction
    from distillspec.serving.online.layout import OnlineSettings

    settings = OnlineSettings(
        config.online, config.replay, config.adapt, config.gate, config.loss, config.tracker, config.seed
    )
    check_beginning(settings, draft)
    load_redaction(settings)
    return settings


def _load_engine(config: ServeCommand, draft: Path | None, online: OnlineSettings | None) -> Engine:
    target = load_target(config.target)
    if online is not None:
        from distillspec.serving.online.beginning import NothingIntact, first_draft

        try:
            draft = first_draft(online, target, draft)
        except NothingIntact as error:
            log.error("serving without a draft, and nothing is logged or learnt: %s", error)
    return Engine(target, _load_draft(draft, target), config.engine)


def _load_draft(path: Path | None, target: LanguageModel) -> LanguageModel | None:
    return None if path is None else load_pretrained(str(path), target, target.dtype)


def _adaptation(engine: Engine, online: OnlineSettings, wake: Callable[[], None]) -> Adaptation:
    from distillspec.serving.online.adaptation import Adaptation
    from distillspec.serving.online.beginning import load_redaction

    return Adaptation(engine, online, redact=load_redaction(online), wake=wake)


def _drafts_and_control(
    config: ServeCommand, engine: Engine, draft: Path | None, adaptation: Adaptation | None
) -> dict[str, Any]:
    """What the server's parts are made with besides: drafts by name, and the hand on online adaptation."""
    from distillspec.serving.server.catalogue import open_folder

    if adaptation is not None:
        from distillspec.serving.live.catalogue import RegistryCatalogue
        from distillspec.serving.live.steering import Steering

        return {"catalogue": RegistryCatalogue(adaptation), "online": Steering(adaptation)}
    root = config.server.drafts_folder
    return {} if root is None else {"catalogue": open_folder(engine, root, draft)}


def _summary(parts: Parts, lost: int, seconds: float) -> dict[str, Any]:
    found = {"seconds": seconds, "answers_cut_off": lost, **parts.telemetry.state()}
    return found if parts.online is None else {**found, "online": parts.online.status()}


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"distill serve needs {', '.join(missing)}: pip install 'distillspec[serve]'")
