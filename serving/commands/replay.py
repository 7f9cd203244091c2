"""`distill replay`: inspect or export the log of live traffic, or delete a tenant's answers."""

from __future__ import annotations

from pathlib import Path

from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ReplayCommand
from distillspec.serving.base.acceptance import acceptance_rate
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import Layout


def run(config: ReplayCommand, folder: Path) -> None:
    """Carry out `action=` on the log in `online.folder`."""
    layout = Layout(Path(config.online.folder))
    layout.check_usable()
    replay = ReplayLog(layout.replay)
    open_run(folder, config)
    actions = {"inspect": _inspect, "export": _export, "delete": _delete, "exclude": _exclude, "include": _exclude}
    close_run(folder, "replay", actions[config.action](config, replay, folder))


def _inspect(config: ReplayCommand, replay: ReplayLog, folder: Path) -> dict:
    entries = replay.entries()
    readable = len(replay.load(entries))
    tried, accepted = sum(e.tried for e in entries), sum(e.accepted for e in entries)
    sizes = replay.sizes()
    figures = {
        **sizes,
        "readable": readable,
        "refused": replay.refused,
        "bytes_per_token": sizes["bytes"] / max(1, sizes["tokens"]),
        "acceptance": acceptance_rate(accepted, tried),
        "tenants": replay.tenants(),
        "excluded": sorted(replay.excluded()),
    }
    for name, value in figures.items():
        print(f"{name:<18} {value}")
    return figures


def _export(config: ReplayCommand, replay: ReplayLog, folder: Path) -> dict:
    """Write everything readable (of one tenant) to one safetensors file."""
    path = folder / "replay.safetensors"
    count = replay.export(path, config.tenant)
    print(f"{count} answers" + (f" in {path}" if count else ": nothing is written"))
    return {"answers": count, "file": str(path) if count else None}


def _delete(config: ReplayCommand, replay: ReplayLog, folder: Path) -> dict:
    assert config.tenant is not None
    count = replay.delete_tenant(config.tenant)
    print(
        f"{count} answers of {config.tenant} are deleted from the log and its exports; draft versions that learnt from "
        "them stay, and so does a running server's memory (/admin/replay/delete reaches that)"
    )
    return {"deleted": count}


def _exclude(config: ReplayCommand, replay: ReplayLog, folder: Path) -> dict:
    assert config.tenant is not None
    out = config.action == "exclude"
    replay.exclude_tenant(config.tenant, out)
    print(
        f"nothing of {config.tenant} is logged from now on, by a running server either; what is logged stays"
        if out
        else f"{config.tenant} is logged again; a running server follows at its next start, or by /admin/replay/exclude"
    )
    return {"tenant": config.tenant, "excluded": out}
