"""The files of `serving/deploy`: the systemd unit is valid and hardened, and the Dockerfile's names exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distillspec.composition import compose

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "serving" / "deploy"


def test_the_systemd_unit_is_one(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "distillspec.service").read_text()
    program = re.search(r"ExecStart=(\S+)", unit)
    assert program is not None
    copy = tmp_path / "distillspec.service"
    copy.write_text(unit.replace(program[1], sys.executable))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_keeps_text_private_and_does_not_repeat_a_mistake() -> None:
    lines = (DEPLOY / "distillspec.service").read_text().splitlines()
    assert {"UMask=0077", "RestartPreventExitStatus=2", "Restart=on-failure"} <= set(lines)


HARDENING = {
    "NoNewPrivileges": "true",
    "CapabilityBoundingSet": "",
    "PrivateTmp": "true",
    "ProtectSystem": "strict",
    "ProtectHome": "true",
    "ProtectProc": "invisible",
    "ProtectKernelTunables": "true",
    "ProtectKernelModules": "true",
    "ProtectKernelLogs": "true",
    "ProtectControlGroups": "true",
    "ProtectClock": "true",
    "ProtectHostname": "true",
    "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    "RestrictNamespaces": "true",
    "RestrictRealtime": "true",
    "RestrictSUIDSGID": "true",
    "LockPersonality": "true",
    "SystemCallFilter": "@system-service",
    "SystemCallErrorNumber": "EPERM",
    "SystemCallArchitectures": "native",
    "DevicePolicy": "closed",
    "DeviceAllow": "char-nvidia* rw",
}
BREAKS_SERVING = {"MemoryDenyWriteExecute", "PrivateDevices", "PrivateNetwork", "ProcSubset"}


def directives() -> dict[str, str]:
    """Return the values of the unit's directives by name, the last one where a name comes several times."""
    lines = (DEPLOY / "distillspec.service").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("name", sorted(HARDENING))
def test_the_unit_is_hardened(name: str) -> None:
    assert directives().get(name) == HARDENING[name]


def test_the_unit_leaves_what_serving_needs() -> None:
    """Machine code written by torch, GPUs, the network, and what /proc says of processor and memory."""
    assert not BREAKS_SERVING & set(directives())


def test_compiler_and_trainer_have_folders_to_write_to() -> None:
    """All else is read-only under ProtectSystem=strict. The cache of built kernels lies in the state folder."""
    unit = directives()
    state = f"/var/lib/{unit['StateDirectory']}"
    assert unit["WorkingDirectory"] == state
    assert unit["Environment"].startswith(f"XDG_CACHE_HOME={state}/")


def test_the_commands_of_unit_and_container_are_settings() -> None:
    unit = (DEPLOY / "distillspec.service").read_text()
    started = re.search(r"ExecStart=\S+ serve (.*)", unit)
    entry = re.search(r"ENTRYPOINT \[(.*)\]", (DEPLOY / "Dockerfile").read_text())
    assert started is not None
    assert entry is not None
    _, command, *words = [word.strip(", ") for word in shlex.split(entry[1].replace(",", " "))]
    assert command == "serve"
    config = compose("serve", words)
    assert config.server.host == "0.0.0.0"
    config = compose("serve", started[1].split())
    limit = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert limit is not None
    assert config.server.drain_s + 10 < int(limit[1]), "systemd must not kill what still drains"


def test_what_the_dockerfile_takes_from_here_is_here() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    pin = re.search(r"grep '(\^torch==)' constraints.txt", lines)
    assert pin is not None
    assert re.search(pin[1], (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = re.search(r"'\.\[([a-z,]+)\]'", lines)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))
