"""`distill versions`: list, show, promote, roll back and clear away draft versions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import VersionsCommand
from distillspec.errors import ConfigError
from distillspec.serving.online.state.layout import Layout
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version


def run(config: VersionsCommand, folder: Path) -> None:
    """Carry out `action=` on the versions in `online.folder`. A running server follows by itself."""
    layout = Layout(Path(config.online.folder))
    versions = layout.versions
    if not layout.registry.is_file():
        raise ConfigError(f"there are no versions in {versions}; a server with online=on makes them")
    registry = VersionRegistry(versions)
    if config.version is not None:
        registry.get(config.version)
    open_run(folder, config)
    actions = {"list": _list, "show": _show, "promote": _promote, "rollback": _rollback, "gc": _clear_away}
    close_run(folder, "versions", actions[config.action](config, registry))


def _list(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    found = registry.versions()
    for version in found:
        print(_line(version))
    return {"versions": [_plain(version) for version in found]}


def _show(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    version = registry.get(str(config.version))
    shown = {**_plain(version), "problem": registry.problem_of(version)}
    print(json.dumps(shown, indent=2))
    return shown


def _promote(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    version = registry.promote(str(config.version), "promoted by hand")
    print(_line(version))
    return {"serving": version.name}


def _rollback(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    version = registry.rollback("rolled back by hand")
    print(_line(version))
    return {"serving": version.name}


def _clear_away(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    gone = registry.clear_away(config.keep)
    print(f"{len(gone)} folders are cleared away: {', '.join(gone) or 'none'}")
    return {"gone": gone}


def _line(version: Version) -> str:
    learnt = "" if version.first_request is None else f"requests {version.first_request}–{version.last_request}"
    return f"{version.name:<22} {version.status:<13} {learnt:<24} {version.reason}"


def _plain(version: Version) -> dict[str, Any]:
    return {**asdict(version), "path": str(version.path)}
