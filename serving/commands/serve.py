"""`distill serve`: load the models and serve until a signal. With `online`, train the draft on the traffic."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distillspec.commands.drafts import find_draft, find_drafts
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import EngineConfig, ServeCommand
from distillspec.config.registry import WITHOUT_DRAFT
from distillspec.errors import ConfigError, RunError, Terminated
from distillspec.models import LanguageModel, load_target
from distillspec.serving.base.threads import in_own_thread
from distillspec.serving.cost_keeper import CostKeeper
from distillspec.serving.costs.kept_costs import cost_key, kept_costs
from distillspec.serving.draft_loading import device_of_drafts, draft_names, load_drafts, load_named
from distillspec.serving.engine import Engine
from distillspec.serving.engine_drafts import by_source
from distillspec.serving.proposers.settings_checks import check_named

if TYPE_CHECKING:
    from distillspec.serving.online.adaptation import Adaptation
    from distillspec.serving.online.state.layout import OnlineSettings
    from distillspec.serving.server.answers.app_state import AppState

log = logging.getLogger(__name__)

COSTS = "costs.json"  # beside a profile
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(config: ServeCommand, folder: Path) -> None:
    """Serve until a signal, then write `summary.json`. Checks keys, address and folders before it loads models.

    Raises:
        ConfigError: a setting is invalid, the port is taken, or the extra `serve` is not installed.
        RunError: another server trains in `online.folder`, the folder is not writable, or the engine failed for good.
        KeyboardInterrupt: answers were aborted at the end (`Terminated` for SIGTERM).
    """
    _check_installed()
    from distillspec.serving.server.answers.app_state import make_app_state
    from distillspec.serving.server.app import create_app
    from distillspec.serving.server.bridge.catalogue import folder_of
    from distillspec.serving.server.http.keys import load_admin_key, load_api_keys
    from distillspec.serving.server.listening import DrainingServer, bind, check_exposure, startup_banner, url_of
    from distillspec.serving.server.observability.logs import logging_to_stderr
    from distillspec.serving.server.observability.tracing import Tracing

    keys = load_api_keys(config.server)
    admin = load_admin_key(config.server, keys)
    check_exposure(config.server, bool(keys))
    tracing = Tracing(config.server.tracing)
    if config.server.drafts_folder is not None:
        folder_of(config.server.drafts_folder)
    draft = None if config.draft.path is None else find_draft(config.draft.path)
    paths = find_drafts(config.drafts)
    drafts = dict(zip(draft_names(paths), paths, strict=True))
    check_named(config.engine, drafts)
    online = _online_settings(config, draft or next(iter(paths), None))
    state: AppState
    with (
        bind(config.server) as bound,
        logging_to_stderr(config.server.log_format),
        closing(in_own_thread(lambda: load_engine(config, draft, drafts, online))) as engine,
    ):
        has_draft = engine.proposer is not None
        adaptation = _adaptation(engine, online, lambda: state.bridge.thread.wake()) if online and has_draft else None
        extra = _drafts_and_control(config, engine, draft, drafts, adaptation)
        state = make_app_state(config.server, engine, keys=keys, admin=admin, tracing=tracing, **extra)
        with _keeper(engine, config), adaptation or nullcontext():
            open_run(folder, config)
            print(startup_banner(url_of(bound, config.server), state), flush=True)
            started_s = time.monotonic()
            server = DrainingServer(create_app(state), state)
            server.run(sockets=[bound])
            summary = _summary(state, server.aborted_answers, time.monotonic() - started_s)
    close_run(folder, "serve", summary)
    if state.bridge.dead is not None:
        raise RunError(f"the engine stopped: {state.bridge.dead}")
    if server.aborted_answers:
        raise Terminated if server.signal_number == Terminated.signal_number else KeyboardInterrupt


def _online_settings(config: ServeCommand, draft: Path | None) -> OnlineSettings | None:
    if config.online.mode == "off":
        return None
    from distillspec.serving.online.bootstrap import check_bootstrap, load_redaction
    from distillspec.serving.online.state.layout import OnlineSettings

    settings = OnlineSettings.of(config)
    check_bootstrap(settings, draft)
    load_redaction(settings)
    return settings


def load_engine(
    config: ServeCommand, draft: Path | None, drafts: Mapping[str, Path], online: OnlineSettings | None
) -> Engine:
    """Load target and drafts, those of the online folder where the server learns, and build the engine.

    Raises:
        ConfigError: models or settings do not fit together.
    """
    target = load_target(config.target)
    kept = costs_file(config, online)
    if online is not None:
        return _learning_engine(config, target, draft, drafts, online, kept)
    device = device_of_drafts(config.draft.device, target)
    loaded = load_named(drafts, target, device) if drafts else load_drafts(draft, target, device)
    return _engine_with_costs(target, by_source(loaded), config.engine, kept)


def costs_file(config: ServeCommand, online: OnlineSettings | None) -> Path | None:
    """Return where a server keeps what its steps cost: beside the profile, or else in the online folder."""
    if config.engine.profile is not None:
        profile = Path(config.engine.profile)
        return (profile if profile.is_dir() else profile.parent) / COSTS
    return None if online is None else online.layout.costs


def _engine_with_costs(
    target: LanguageModel, drafts: Mapping[str, LanguageModel], settings: EngineConfig, kept: Path | None
) -> Engine:
    """Return an engine with the costs that a server before it has kept in this file, if they fit."""
    costs = None if kept is None else kept_costs(kept, cost_key(target, drafts, settings))
    if costs is None:
        return Engine(target, drafts, settings)
    log.info("costs of steps as kept in %s", kept)
    engine = Engine(target, drafts, replace(settings, measure_costs_s=0.0))
    engine.use_costs(costs)
    return engine


def _learning_engine(
    config: ServeCommand,
    target: LanguageModel,
    draft: Path | None,
    drafts: Mapping[str, Path],
    online: OnlineSettings,
    kept: Path | None,
) -> Engine:
    """Return an engine with the drafts of the online folder."""
    from distillspec.serving.online.bootstrap import NothingIntact, first_draft, first_drafts, has_pool

    settings, device = config.engine, device_of_drafts(config.draft.device, target)
    try:
        if drafts or (draft is None and has_pool(online)):
            loaded = by_source(load_named(first_drafts(online, target, drafts), target, device))
        else:
            loaded = by_source(load_drafts(first_draft(online, target, draft), target, device))
    except NothingIntact as error:
        log.error("serving without a draft; nothing is logged or trained: %s", error)
        plain = replace(settings, proposer=WITHOUT_DRAFT, proposer_options={}, tree=None, widths=[])
        return Engine(target, None, plain)
    return _engine_with_costs(target, loaded, settings, kept)


def _keeper(engine: Engine, config: ServeCommand) -> AbstractContextManager[object]:
    """Return what keeps the costs beside a profile. In the online folder `Adaptation` keeps them."""
    kept = costs_file(config, None)
    return nullcontext() if kept is None else CostKeeper(engine, kept)


def _adaptation(engine: Engine, online: OnlineSettings, wake: Callable[[], None]) -> Adaptation:
    from distillspec.serving.online.adaptation import Adaptation
    from distillspec.serving.online.bootstrap import load_redaction

    return Adaptation(engine, online, redact=load_redaction(online), wake=wake)


def _drafts_and_control(
    config: ServeCommand,
    engine: Engine,
    draft: Path | None,
    drafts: Mapping[str, Path],
    adaptation: Adaptation | None,
) -> dict[str, Any]:
    """Return the keyword arguments of `make_app_state` for the catalogue of drafts and online adaptation."""
    from distillspec.serving.server.bridge.catalogue import FolderCatalogue, PoolCatalogue

    if adaptation is not None:
        from distillspec.serving.commands.online_serving import AdaptationControl, RegistryCatalogue

        return {"catalogue": RegistryCatalogue(adaptation), "online": AdaptationControl(adaptation)}
    root = config.server.drafts_folder
    if drafts:
        return {"catalogue": PoolCatalogue(engine, drafts, root)}
    return {} if root is None else {"catalogue": FolderCatalogue(engine, root, draft)}


def _summary(state: AppState, aborted: int, seconds: float) -> dict[str, Any]:
    summary = {"seconds": seconds, "answers_cut_off": aborted, **state.telemetry.state()}
    return summary if state.online is None else {**summary, "online": state.online.status()}


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"distill serve needs {', '.join(missing)}: pip install 'distillspec[serve]'")
