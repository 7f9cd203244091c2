"""The wheel, built from the sdist of what git knows and installed elsewhere, must stand on its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MAPPED = {"serving": "distillspec/serving", "conf": "distillspec/conf", "recipes": "distillspec/recipes"}
SHIPPED = {".py", ".yaml", ".html", ".typed"}  # other files may stay behind


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    """Every file that git tracks or would track, relative to the root."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to tell sources from leftovers")
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("sources")
    for source in sources:
        (copy / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / source, copy / source)
    for link in MAPPED.values():
        (copy / link).symlink_to((ROOT / link).readlink())
    out = tmp_path_factory.mktemp("wheel")
    # Without --wheel, `build` makes the wheel from the sdist.
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)], cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel)], cwd="/")
    return target


@pytest.fixture(scope="module")
def probe(site: Path) -> Mapping[str, Any]:
    script = Path(__file__).with_name("wheel_probe.py").read_text()
    return json.loads(_run([sys.executable, "-c", script], cwd="/", site=site).splitlines()[-1])


def test_the_wheel_holds_every_source_and_nothing_else(sources: list[Path], wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    packaged = {_installed_name(source) for source in sources if source.parts[0] in ("distillspec", *MAPPED)}
    assert {name for name in packaged if Path(name).suffix in SHIPPED} - held == set()
    assert held - packaged == set()


def test_every_module_imports_from_the_wheel_alone(probe: Mapping[str, Any], site: Path, wheel: Path) -> None:
    optional = _modules_of_extras(wheel)
    modules = probe["modules"]
    broken = {
        name: result["error"]
        for name, result in modules.items()
        if "error" in result and (result["missing"] or "").split(".")[0] not in optional
    }
    assert broken == {}
    strangers = {
        name: result["file"]
        for name, result in modules.items()
        if "file" in result and not Path(result["file"] or "/").is_relative_to(site)
    }
    assert strangers == {}


def test_no_module_is_out_of_reach(probe: Mapping[str, Any], sources: list[Path]) -> None:
    """A folder without `__init__.py` would be shipped but never found."""
    files = [_installed_name(source) for source in sources if source.suffix == ".py"]
    names = {file[: -len(".py")].replace("/", ".") for file in files if file.startswith("distillspec/")}
    wanted = {name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")}
    assert set(probe["modules"]) == wanted


def test_every_config_composes(probe: Mapping[str, Any], sources: list[Path]) -> None:
    files = [source.relative_to("conf") for source in sources if source.parts[0] == "conf" and source.suffix == ".yaml"]
    wanted = {str(f.stem) if len(f.parts) == 1 else f"{f.parent}={f.stem}" for f in files}
    assert {"train", "loss=fkl", "hardware=a100-7b"} <= wanted
    composed = {words.split()[-1]: problem for words, problem in probe["configs"].items()}
    assert composed == dict.fromkeys(wanted)


def test_distill_explains_itself(site: Path) -> None:
    for command in ([str(site / "bin" / "distill")], ["-m", "distillspec.cli"]):
        assert "distill" in _run([sys.executable, *command, "--help"], cwd="/", site=site)


def _installed_name(source: Path) -> str:
    return "/".join((MAPPED.get(source.parts[0], source.parts[0]), *source.parts[1:]))


def _modules_of_extras(wheel: Path) -> set[str]:
    """Names of the packages that only an extra installs; they may be absent."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(metadata).decode())
    requirements = [Requirement(line) for line in message.get_all("Requires-Dist", [])]
    return {
        canonicalize_name(item.name).replace("-", "_")
        for item in requirements
        if item.marker is not None and "extra" in str(item.marker)
    }


def _run(command: list[str], cwd: Path | str, site: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command[:6]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
