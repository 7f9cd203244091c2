"""Provenance names what made a result, anywhere, and never stops a run."""

from __future__ import annotations

import json
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import distillspec
import distillspec.provenance as module
from distillspec.provenance import provenance


def test_it_records_command_seed_packages_and_hardware() -> None:
    record = json.loads(json.dumps(provenance(["distill", "eval", "drafts=[a]"], seed=7)))
    assert record["argv"] == ["distill", "eval", "drafts=[a]"]
    assert record["seed"] == 7
    assert record["distillspec"] == distillspec.__version__
    assert record["packages"]["torch"] == torch.__version__
    assert {"transformers", "accelerate", "datasets", "hydra-core", "safetensors", "numpy"} <= set(record["packages"])
    assert record["hardware"]["cores"] >= 1
    assert record["hardware"]["memory_bytes"] > 2**20
    age = datetime.now(UTC) - datetime.fromisoformat(record["started"])
    assert 0 <= age.total_seconds() < 120


def test_it_names_no_host() -> None:
    assert len(socket.gethostname()) == 0 or socket.gethostname() not in json.dumps(provenance([], 0)["os"])
    assert not {"host", "hostname", "user"} & set(provenance([], 0))


def test_the_commit_is_that_of_the_package_and_dirt_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, monkeypatch)
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    record = provenance([], 0)
    assert record["git_commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert record["git_dirty"] is False

    (tmp_path / "distillspec" / "new.py").touch()
    assert provenance([], 0)["git_dirty"] is True


def test_a_checkout_without_commits_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, monkeypatch)
    assert provenance([], 0)["git_commit"] is None


def test_a_package_inside_another_projects_repository_does_not_claim_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    installed = tmp_path / ".venv" / "lib" / "distillspec" / "provenance.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    monkeypatch.setattr(module, "__file__", str(installed))
    record = provenance([], 0)
    assert record["git_commit"] is None
    assert record["git_dirty"] is None


def test_what_cannot_be_found_out_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(module.subprocess, "run", fail)  # no git
    monkeypatch.setattr(module.os, "sysconf", fail)
    monkeypatch.setattr(module.importlib.metadata, "version", fail)
    monkeypatch.setattr(module.torch.cuda, "device_count", fail)
    record = provenance(["distill"], 0)
    assert record["git_commit"] is None
    assert record["hardware"]["memory_bytes"] is None
    assert record["hardware"]["gpus"] == []
    assert record["packages"] == {}


def checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(folder, "init", "-q")
    source = folder / "distillspec" / "provenance.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(module, "__file__", str(source))


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
