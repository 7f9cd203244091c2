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
    layout.check_usable()
    versions = layout.versions
    if not layout.registry.is_file():
        raise ConfigError(f"there are no versions in {versions}; a server with online=on makes them")
    registry = VersionRegistry(versions)
    if config.version is not None:
        registry.get(config.version)
    if config.action == "withdraw":
        _check_withdrawal(config, registry)
    open_run(folder, config)
    actions = {
        "list": _list,
        "show": _show,
        "promote": _promote,
        "rollback": _rollback,
        "gc": _clear_away,
        "withdraw": _withdraw,
    }
    close_run(folder, "versions", actions[config.action](config, registry))


def _list(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    versions = [version for member_registry in _of_all(registry) for version in member_registry.versions()]
    for member in registry.pool.members():
        print(f"{member.name:<22} {member.status:<13} {member.reason}")
    for version in versions:
        print(_line(version))
    return {"versions": [_plain(version) for version in versions]}


def _show(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    version = registry.get(str(config.version))
    shown = {**_plain(version), "problem": registry.problem_of(version)}
    print(json.dumps(shown, indent=2))
    return shown


def _promote(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    member_registry = registry.of(registry.get(str(config.version)).member)
    version = member_registry.promote(str(config.version), "promoted by hand")
    print(_line(version))
    return {"serving": version.name}


def _rollback(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    version = registry.of(_named(config, registry)).rollback("rolled back by hand")
    print(_line(version))
    return {"serving": version.name}


def _check_withdrawal(config: VersionsCommand, registry: VersionRegistry) -> None:
    """Refuse an unknown draft, and the last one that serves and is no specialist: those come and go."""
    name, members = _named(config, registry), registry.pool.members()
    permanent = [member.name for member in members if member.status == "serving" and member.cloned_from is None]
    if permanent == [name] or not name:
        raise ConfigError(f"name={name} is the last draft that serves but for specialists; it cannot be withdrawn")


def _withdraw(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    name = _named(config, registry)
    registry.pool.set_status(name, "withdrawn", "withdrawn by hand")
    print(f"{name} is withdrawn; a running server drops it at once")
    return {"withdrawn": name}


def _clear_away(config: VersionsCommand, registry: VersionRegistry) -> dict[str, Any]:
    gone = [name for member_registry in _of_all(registry) for name in member_registry.clear_away(config.keep)]
    print(f"{len(gone)} folders are cleared away: {', '.join(gone) or 'none'}")
    return {"gone": gone}


def _of_all(registry: VersionRegistry) -> list[VersionRegistry]:
    """Return the versions of each draft, present or withdrawn."""
    return [registry.of(member.name) for member in registry.pool.members()] or [registry]


def _named(config: VersionsCommand, registry: VersionRegistry) -> str:
    """Return the draft that a command is about.

    Raises:
        ConfigError: there is none of this name, or several and none is named.
    """
    names = [member.name for member in registry.pool.members()]
    if (config.name or "") not in (names or [""]):
        there = f"there are {', '.join(names)}" if names else "there is one draft, which has no name"
        raise ConfigError(f"name={config.name or ''} is no draft in {registry.folder}; {there}")
    return config.name or ""


def _line(version: Version) -> str:
    learnt = "" if version.first_request is None else f"requests {version.first_request}–{version.last_request}"
    return f"{version.name:<22} {version.status:<13} {learnt:<24} {version.reason}"


def _plain(version: Version) -> dict[str, Any]:
    return {**asdict(version), "path": str(version.path)}
