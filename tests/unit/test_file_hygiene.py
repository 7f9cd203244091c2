"""Promises that the repository's files make to each other: pins, extras, scripts, module headers."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED_EXTRAS = ("demo", "serve", "wandb", "deepspeed", "dev")  # what scripts/_setup.sh installs, and
FREE_EXTRAS = ("kernels",)  # which Triton is wanted depends on torch's build
SCRIPTS = ("scripts/demo", "scripts/test", "scripts/soak", ".ci/run")
MODULES = sorted(file for folder in ("distillspec", "serving", "recipes") for file in (ROOT / folder).rglob("*.py"))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(item.name): str(item.specifier) for item in requirements}


def test_constraints_are_exact_versions_without_places() -> None:
    assert all(re.fullmatch(r"==[0-9][0-9A-Za-z.]*", version) for version in pins().values())
    assert "://" not in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("group", ["dependencies", *PINNED_EXTRAS])
def test_every_direct_dependency_is_pinned_to_a_version_that_pyproject_accepts(group: str) -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(line) for line in (PROJECT["dependencies"] if group == "dependencies" else extras[group])]
    pinned = pins()
    unpinned = [item.name for item in wanted if canonicalize_name(item.name) not in pinned]
    assert unpinned == []
    refused = [
        str(item)
        for item in wanted
        if not item.specifier.contains(pinned[canonicalize_name(item.name)].removeprefix("=="))
    ]
    assert refused == []


def test_the_setup_script_installs_every_extra() -> None:
    assert sorted(PROJECT["optional-dependencies"]) == sorted(PINNED_EXTRAS + FREE_EXTRAS)
    assert f"test) extras={','.join(PINNED_EXTRAS + FREE_EXTRAS)} ;;" in (ROOT / "scripts/_setup.sh").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_executable_and_strict(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    lines = (ROOT / name).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines


def test_every_module_says_what_it_is() -> None:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in MODULES}
    assert len(trees) > 0
    assert [str(file) for file, tree in trees.items() if tree.body and ast.get_docstring(tree) is None] == []


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    assert f'__version__ = "{version}"' in (ROOT / "distillspec/__init__.py").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
