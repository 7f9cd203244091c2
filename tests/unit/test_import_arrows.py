"""The map of ARCHITECTURE.md, enforced: who may import whom, and no cycles. Reads the code, never runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folder → the name it is installed under. The links in distillspec/ to the other three are not followed.
FOLDERS = {
    "serving": "distillspec.serving",
    "conf": "distillspec.conf",
    "recipes": "distillspec.recipes",
    "distillspec": "distillspec",
}

# Every part may import these. They import nothing of ours, but `types` the signals that samples hold.
COMMON = {"signals", "types", "errors", "files"}
MODEL_SIDE = {"config", "native", "sampling", "rejection_sampling", "recording", "losses", "models"}
ALL_BUT_SERVING = MODEL_SIDE | {
    "provenance",
    "data",
    "generation",
    "training",
    "evaluation",
    "export",
    "report",
}

ENGINE = {
    "serving",
    "serving.base",
    "serving.costs",
    "serving.step",
}  # what stands around an engine sees of it
ONLINE = {"serving.online.state", "serving.online.log", "serving.online.judging", "serving.online.training"}

# The same for the packages of serving/, in the order of a step: a package imports from those above it alone.
SERVING_ARROWS: dict[str, set[str]] = {
    "base": {"config", "sampling"},
    "costs": {"config", "models", "provenance", "serving.base"},
    "planning": {"serving.base", "serving.costs"},
    "control": {"config", "serving.base", "serving.costs", "serving.planning"},
    "baselines": {"config", "serving.base", "serving.costs", "serving.control"},
    "selection": {"config", "serving.base", "serving.costs"},
    "execution": {"config", "native", "models", "serving.base"},
    "decoding": {"config", "native", "sampling", "rejection_sampling", "serving.base"},
    "sequences": {"serving.base", "serving.execution"},
    "proposers": {"config", "models", "sampling", "serving.base", "serving.decoding", "serving.execution"},
    "step": {
        "models",
        "serving.base",
        "serving.execution",
        "serving.decoding",
        "serving.sequences",
        "serving.proposers",
    },
    "": {  # engine and its builder, generator, profiler, the decoder of measured speed-ups
        "config",
        "evaluation",
        "models",
        "recording",
        "serving.base",
        "serving.costs",
        "serving.control",
        "serving.execution",
        "serving.decoding",
        "serving.sequences",
        "serving.proposers",
        "serving.selection",
        "serving.step",
    },
    "bench": {"config", "evaluation", "serving", "serving.base"},
    "simulation": {
        "config",
        "serving.base",
        "serving.costs",
        "serving.control",
        "serving.baselines",
        "serving.execution",
        "serving.sequences",
        "serving.proposers",
        "serving.selection",
        "serving.step",
        "serving.bench",
    },
    "online.state": {"config", "models"},
    "online.log": {"config", "native", "recording", "data", "serving.base", "serving.step", "serving.online.state"},
    "online.pool": {"config", "serving.selection", "serving.online.state", "serving.online.log"},
    "online.judging": {
        "evaluation",
        "models",
        "sampling",
        "serving.online.state",
        "serving.online.log",
    },
    "online.training": {
        "config",
        "evaluation",
        "losses",
        "models",
        "data",
        "training",
        "sampling",
        "serving.online.state",
        "serving.online.log",
        "serving.online.pool",
        "serving.online.judging",
    },
    "online.gate": {"config", "models", "data", "evaluation", *ENGINE, *ONLINE},
    "online": {
        "config",
        "models",
        "training",
        *ENGINE,
        *ONLINE,
        "serving.online.pool",
        "serving.online.gate",
        "serving.selection",
    },
    "server.http": {"config", "serving.base"},
    "server.bridge": {"models", *ENGINE, "serving.server.http"},
    "server.observability": {"serving.base", "serving.selection", "serving.server.bridge"},
    "server.answers": {
        "config",
        "data",
        "serving",
        "serving.base",
        "serving.selection",
        "serving.sequences",
        "serving.server.http",
        "serving.server.bridge",
        "serving.server.observability",
    },
    "server.routes": {"serving.server.http", "serving.server.bridge", "serving.server.answers"},
    "server": {
        "config",
        "serving.selection",
        "serving.server.http",
        "serving.server.observability",
        "serving.server.answers",
        "serving.server.routes",
    },
}
SERVING = {f"serving.{package}" if package else "serving" for package in SERVING_ARROWS}
SERVING_ARROWS["commands"] = ALL_BUT_SERVING | SERVING | {"commands", "progress"}

# Part → what it may import besides COMMON and itself.
ARROWS: dict[str, set[str]] = {
    "": set(),  # distillspec/__init__.py
    "signals": set(),
    "types": {"signals"},
    "errors": set(),
    "files": set(),
    "conf": set(),
    "config": set(),
    "sampling": set(),
    "rejection_sampling": set(),
    "recording": {"native", "sampling"},
    "provenance": set(),
    "losses": {"config", "sampling"},
    "native": set(),
    "models": {"config", "native"},
    "generation": {"config", "sampling", "recording", "models"},
    "data": {"config", "sampling", "recording", "models", "generation"},
    "evaluation": {"config", "provenance", "sampling", "rejection_sampling", "losses", "models", "data", "generation"},
    "training": {"config", "provenance", "sampling", "losses", "models", "data", "generation"},
    "export": {"config", "provenance", "models"},
    "report": {"config", "provenance", "evaluation"},
    "progress": set(),
    "composition_errors": {"config"},
    "composition": {"config", "composition_errors"},
    "hydra_run": {"config", "composition_errors", "composition"},
    "helptext": {"config", "composition_errors"},
    "commands": ALL_BUT_SERVING | {"progress"},
    "cli": ALL_BUT_SERVING | {"commands", "composition", "hydra_run", "helptext", "serving", "serving.commands"},
    "recipes": ALL_BUT_SERVING | {"commands", "cli", "composition", "progress", *SERVING},
    **{f"serving.{package}" if package else "serving": arrows for package, arrows in SERVING_ARROWS.items()},
}
OF_THEIR_ARROWS_ALONE = {"signals", "types", "errors"}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    when_loaded: bool  # False inside a function or under `if TYPE_CHECKING`


def find_modules(root: Path) -> dict[str, Path]:
    """Installed module name → file, for every Python file of the package."""
    modules = {}
    for folder, package in FOLDERS.items():
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            if folder == "distillspec" and parts[0] in ("serving", "conf", "recipes"):
                continue
            name = ".".join((package, *parts)).removesuffix(".__init__")
            modules[name] = file
    return modules


def find_imports(name: str, file: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Every import of ours in one module, lazy and type-only ones included."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node, when_loaded in _walk(ast.parse(file.read_text(encoding="utf-8")), True):
        for target in _targets(node, package, modules):
            if target.split(".")[0] in FOLDERS:
                yield Import(name, target, node.lineno, when_loaded)


def _walk(node: ast.AST, when_loaded: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when_loaded
            continue
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        yield from _walk(child, when_loaded and not deferred)


def _targets(node: ast.Import | ast.ImportFrom, package: str, modules: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
    for alias in node.names:
        # `from package import name` means the module package.name where there is one.
        submodule = f"{base}.{alias.name}"
        yield submodule if submodule in modules else base


def part_of(module: str) -> str:
    """The row of ARROWS a module belongs to, the most specific one: `distillspec.losses.chunked` → `losses`."""
    names = module.split(".")[1:]
    rows = (".".join(names[:count]) for count in range(len(names), 0, -1))
    return next((row for row in rows if row in ARROWS), (names or [""])[0])


def forbidden(imports: list[Import]) -> list[str]:
    arrows = (f"{item.importer}:{item.line} must not import {item.imported}" for item in imports if not allowed(item))
    return list(dict.fromkeys(arrows))  # a line that imports two names is one arrow


def allowed(item: Import) -> bool:
    if item.imported.split(".")[0] != "distillspec":
        return False  # `import serving`: a second copy under another name
    importer, imported = part_of(item.importer), part_of(item.imported)
    if importer == imported or imported == "":
        return True
    arrows = ARROWS.get(importer, set())
    return imported in arrows or (imported in COMMON and importer not in OF_THEIR_ARROWS_ALONE)


def find_cycle(edges: set[tuple[str, str]]) -> list[str]:
    """One cycle of a directed graph as the list of its nodes, or an empty list."""
    followers: dict[str, set[str]] = {}
    for source, target in edges:
        followers.setdefault(source, set()).add(target)
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in finished:
            return []
        for follower in sorted(followers.get(node, ())):
            if cycle := visit(follower, [*path, node]):
                return cycle
        finished.add(node)
        return []

    return next((cycle for node in sorted(followers) if (cycle := visit(node, []))), [])


def all_imports(root: Path) -> list[Import]:
    modules = find_modules(root)
    return [item for name, file in modules.items() for item in find_imports(name, file, modules)]


def test_every_part_has_a_row_in_the_table() -> None:
    parts = {part_of(module) for module in find_modules(ROOT)}
    assert {"types", "errors", "files"} <= parts
    assert parts <= set(ARROWS), "add the new part to ARROWS and to ARCHITECTURE.md"


def test_every_package_of_serving_has_a_row_of_its_own() -> None:
    packages = {file.parent.relative_to(ROOT) for file in (ROOT / "serving").rglob("*.py")}
    assert {".".join(package.parts) for package in packages} == SERVING | {"serving.commands"}


def test_no_forbidden_arrow() -> None:
    assert forbidden(all_imports(ROOT)) == []


def test_no_cycle_between_parts() -> None:
    edges = {(part_of(item.importer), part_of(item.imported)) for item in all_imports(ROOT)}
    assert find_cycle({(source, target) for source, target in edges if source != target and target}) == []


def test_no_cycle_between_modules_when_loaded() -> None:
    imports = [item for item in all_imports(ROOT) if item.when_loaded]
    assert find_cycle({(item.importer, item.imported) for item in imports}) == []


def test_the_table_itself_has_no_cycle() -> None:
    assert find_cycle({(part, target) for part, targets in ARROWS.items() for target in targets}) == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("distillspec/types.py", "import distillspec.errors"),
        ("distillspec/losses/kl.py", "from distillspec.models import target"),
        ("distillspec/losses/kl.py", "from distillspec import models"),
        ("distillspec/losses/kl.py", "from ..models.target import load"),
        ("distillspec/models/target.py", "def late():\n    import distillspec.training"),
        ("distillspec/data/prompts.py", "def late():\n    from distillspec.serving import Engine"),
        ("distillspec/commands/train.py", "from distillspec.serving.engine import Engine"),
        ("distillspec/training/loop.py", "import serving"),
        ("serving/engine.py", "from distillspec.training import loop"),
        ("serving/engine.py", "from .online import replay"),
        ("serving/engine.py", "from .commands import simulate"),
        ("serving/engine.py", "from .server import app"),
        ("serving/base/tree.py", "from distillspec.serving.control import goodput"),
        ("serving/control/goodput.py", "from ..simulation import clock"),
        ("serving/bench/load.py", "from ..simulation import clock"),
        ("serving/execution/runner.py", "from distillspec.serving.engine import Engine"),
        ("serving/server/app.py", "from distillspec.serving.online import replay"),
        ("serving/online/replay.py", "from distillspec.serving.server import app"),
        ("serving/online/training/trainer.py", "from ...engine import Engine"),
        ("distillspec/commands/train.py", "from distillspec.serving.commands import simulate"),
    ],
)
def test_an_injected_violation_is_found(tmp_path: Path, file: str, code: str) -> None:
    _write(tmp_path, {file: code})
    assert len(forbidden(all_imports(tmp_path))) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (
            "distillspec/models/target.py",
            "from distillspec.types import Prompt\nfrom distillspec import config",
        ),
        ("distillspec/cli.py", "def serve():\n    from distillspec.serving import Engine"),
        ("distillspec/losses/kl.py", "import torch\nfrom . import chunked\nfrom ..sampling import softmax"),
        ("serving/online/training/trainer.py", "from distillspec.training import loop\nfrom ..state import registry"),
        ("serving/commands/simulate.py", "from distillspec.training import loop\nfrom ..engine import Engine"),
        ("serving/commands/online_serving.py", "from ..online import replay\nfrom ..server import app"),
        ("distillspec/cli.py", "def late():\n    from distillspec.serving.commands import simulate"),
    ],
)
def test_a_permitted_import_passes(tmp_path: Path, file: str, code: str) -> None:
    _write(tmp_path, {file: code})
    imports = all_imports(tmp_path)
    assert len(imports) > 0
    assert forbidden(imports) == []


def test_a_module_cycle_is_found_and_a_lazy_import_is_none(tmp_path: Path) -> None:
    first = {"distillspec/losses/a.py": "from distillspec.losses import b"}
    _write(tmp_path, {**first, "distillspec/losses/b.py": "def late():\n    from . import a"})
    loaded = {(item.importer, item.imported) for item in all_imports(tmp_path) if item.when_loaded}
    assert find_cycle(loaded) == []

    _write(tmp_path, {**first, "distillspec/losses/b.py": "from . import a"})
    loaded = {(item.importer, item.imported) for item in all_imports(tmp_path) if item.when_loaded}
    assert find_cycle(loaded) == ["distillspec.losses.a", "distillspec.losses.b"]


def _write(root: Path, files: dict[str, str]) -> None:
    """The given files, beside one empty module for each name that they import."""
    others = ("models/target.py", "models/__init__.py", "losses/chunked.py", "training/loop.py", "config.py")
    for name in (
        *(f"distillspec/{other}" for other in others),
        "serving/engine.py",
        "serving/online/replay.py",
        "serving/commands/simulate.py",
        "serving/server/app.py",
        "serving/control/goodput.py",
        "serving/simulation/clock.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for name, code in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(code)
