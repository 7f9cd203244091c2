"""First drafts of a server: promoted versions, or drafts given by hand. Refuses folders that do not fit."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from distillspec.errors import ConfigError, RunError
from distillspec.models import LanguageModel, save_draft
from distillspec.models.checkpoint import SERVED, check_target
from distillspec.models.draft import load_pretrained
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.redaction import Redaction
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.pool import Member
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.selection import offline_folder

log = logging.getLogger(__name__)


class NothingIntact(RunError):
    """No version that ever served is intact, and no draft was given."""


def first_draft(settings: OnlineSettings, target: LanguageModel, given: str | Path | None = None) -> Path:
    """Return the folder of the draft to start with: the promoted version or, without one, the given draft.

    A given draft that the registry does not know becomes a version and is promoted. So does a known one if no version
    is intact. Nothing is written before draft and folder are known to fit the target.

    Raises:
        ConfigError: there is no draft, or the given one, the log or the versions do not fit the target.
        RunError: the folder cannot be written. `NothingIntact`: the server can serve without a draft.
    """
    draft = None if given is None else _fitting(given, target)
    check_bootstrap(settings, given)
    _check_log(settings, target)
    settings.layout.make_versions()
    with closing(VersionRegistry(settings.layout.versions)) as registry:
        if registry.pool.members():
            raise ConfigError(
                f"online.folder={settings.layout.root} has the versions of several drafts; give drafts=[…] or none, "
                "or another online.folder"
            )
        return _version_to_start(settings, registry, target, draft, given).path


def first_drafts(settings: OnlineSettings, target: LanguageModel, given: Mapping[str, Path]) -> dict[str, Path]:
    """Return the folders of the drafts of a pool to start with, by name. See `first_draft`.

    Drafts that the folder's pool has stay in it, given or not. Specialists on trial are not among them.

    Raises:
        ConfigError: as for one draft, or the folder has the versions of a single one.
        RunError: the folder cannot be written.
    """
    drafts = {name: _fitting(path, target) for name, path in given.items()}
    check_bootstrap(settings, next(iter(given.values()), None))
    _check_log(settings, target)
    settings.layout.make_versions()
    with closing(VersionRegistry(settings.layout.versions)) as registry:
        if registry.versions():
            raise ConfigError(
                f"online.folder={settings.layout.root} has the versions of one draft; give draft.path=FOLDER or none, "
                "or another online.folder"
            )
        folders, problems = dict[str, Path](), list[str]()
        for name in dict.fromkeys([*registry.pool.serving(), *drafts]):
            try:
                draft_registry = registry.of(name)
                folders[name] = _version_to_start(
                    settings, draft_registry, target, drafts.get(name), given.get(name)
                ).path
            except NothingIntact as error:
                problems.append(f"{name}: {error}")
                log.error("the draft %s is left out, and the others serve: %s", name, error)
            else:
                if name in drafts:  # one that was withdrawn comes back
                    registry.pool.add(Member(name))
                    registry.pool.set_status(name, "serving", "given at the start")
        if not folders:
            raise NothingIntact("; ".join(problems) or f"{settings.layout.versions} has no draft that serves")
        return folders


def has_pool(settings: OnlineSettings) -> bool:
    """Return True if the folder has the versions of several drafts."""
    if not settings.layout.registry.is_file():
        return False
    with closing(VersionRegistry(settings.layout.versions)) as registry:
        return bool(registry.pool.members())


def _version_to_start(
    settings: OnlineSettings,
    registry: VersionRegistry,
    target: LanguageModel,
    draft: LanguageModel | None,
    given: str | Path | None,
) -> Version:
    """Return the version of a draft to start with. `draft` is the one loaded from `given`."""
    serving = registry.current()
    if serving is not None and registry.problem_of(serving) is None:
        check_target(serving.path, target)
    if draft is not None and registry.find(draft.identity.weights_hash) is None:
        _add_and_promote(registry, draft, given, target)
    current = registry.boot()
    if current is None and draft is not None:
        current = _add_and_promote(registry, draft, given, target)
    if current is None:
        raise _no_draft(settings) if serving is None else _nothing_intact(settings, serving)
    return current


def check_bootstrap(settings: OnlineSettings, given: str | Path | None) -> None:
    """Check what needs no target. Makes nothing.

    Raises:
        ConfigError: no first draft, a folder that cannot be used, or `adapt.offline` is no data folder.
    """
    settings.layout.check_usable()
    if given is None and not settings.layout.registry.is_file():
        raise _no_draft(settings)
    offline_folder(settings.adapt)


def load_redaction(settings: OnlineSettings) -> Redaction | None:
    """Import the function that `replay.redaction` names.

    Raises:
        ConfigError: it cannot be imported.
    """
    if settings.replay.redaction is None:
        return None
    module, _, name = settings.replay.redaction.partition(":")
    try:
        redaction: Redaction = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module of the user's may raise anything
        raise ConfigError(
            f"replay.redaction={settings.replay.redaction} cannot be imported: {type(error).__name__}: {error}; name "
            "MODULE:FUNCTION, of a module that is installed or in a folder of PYTHONPATH"
        ) from error
    if not callable(redaction):
        raise ConfigError(f"replay.redaction={settings.replay.redaction} is no function; name MODULE:FUNCTION")
    return redaction


def _no_draft(settings: OnlineSettings) -> ConfigError:
    return ConfigError(
        f"there is no draft in {settings.layout.versions} yet; give one to begin with: draft.path=FOLDER, or several: "
        "drafts=[…]"
    )


def _nothing_intact(settings: OnlineSettings, serving: Version) -> NothingIntact:
    return NothingIntact(
        f"no version in {settings.layout.versions} is intact: {serving.name} is damaged, and there is no earlier one; "
        "give a draft to go on with: draft.path=FOLDER, or drafts=[FOLDER,…] where there are several"
    )


def _add_and_promote(
    registry: VersionRegistry, draft: LanguageModel, given: str | Path | None, target: LanguageModel
) -> Version:
    version = registry.add(lambda folder: save_draft(draft, folder, target, dtype=SERVED))
    return registry.promote(version.name, f"given by hand: {Path(str(given)).name}")


def _fitting(given: str | Path, target: LanguageModel) -> LanguageModel:
    draft = load_pretrained(str(given), target)
    check_target(given, target)
    return draft


def _check_log(settings: OnlineSettings, target: LanguageModel) -> None:
    """Open the log if there is one. It refuses another target's."""
    if settings.layout.manifest.is_file():
        ReplayLog(settings.layout.replay, LogKey.of(target.identity, settings.replay.entries)).close()
