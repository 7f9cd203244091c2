"""The tree keeps its shape: tests are found by the name of their module, files and functions stay small, and docstrings
follow the language rules."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"
SOURCES = {name: ROOT / name for name in ("serving", "recipes", "conf")}
WHOLE_TREE = {  # tests of no single module; those in tests/unit/docs are of all pages
    "test_benchmark_results",
    "test_file_hygiene",
    "test_import_arrows",
    "test_tree_shape",
}
MODULES = [
    file
    for folder in ("distillspec", "serving", "recipes")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if file.name != "__init__.py"
]
TAKE_NAMES = {"setattr", "getattr", "delattr", "hasattr", "patch", "object"}  # functions with an attribute's name
LARGEST_FILE, MEDIAN_FILE, MOST_TEST_LINES = 300, 100, 400
LONGEST_OF_NINE_IN_TEN = 20  # lines of a function
FEW_SEMICOLONS = 0.05  # of docstrings
QUESTIONS = ("What", "Whether", "How", "Who", "Which")
REWRITTEN_NEXT = (  # by the issue on the engine's ground, which brings their English
    "serving/control/",
    "serving/proposers/",
    "serving/execution/runner.py",
    "serving/execution/graphs.py",
    "serving/decoding/sampling.py",
)


def source_folder(test: Path) -> Path:
    """Folder that a test's folder mirrors: tests/unit/losses → distillspec/losses, tests/unit/serving → serving."""
    names = test.parent.relative_to(UNIT).parts
    base = SOURCES.get(names[0]) if names else None
    return ROOT.joinpath("distillspec", *names) if base is None else base.joinpath(*names[1:])


def mirrors(test: Path, names: set[str]) -> bool:
    """True when the test is called `test_NAME` or `test_NAME_ASPECT` for one of the names."""
    subject = test.stem.removeprefix("test_")
    return any(subject == name or subject.startswith(f"{name}_") for name in names)


def names_in(folder: Path) -> set[str]:
    """Names of the modules and packages of a folder."""
    if not folder.is_dir():
        return set()
    return {entry.stem.strip("_") for entry in folder.iterdir() if entry.suffix == ".py" or entry.is_dir()}


def test_a_test_is_found_by_the_name_of_its_module() -> None:
    found = sorted(UNIT.rglob("test_*.py"))
    tests = [test for test in found if test.stem not in WHOLE_TREE and test.parent != UNIT / "docs"]
    assert len(tests) > 100
    strangers = [test for test in tests if not mirrors(test, names_in(source_folder(test)))]
    assert [str(test.relative_to(ROOT)) for test in strangers] == []


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("losses/test_chunked.py", True),
        ("losses/test_chunked_memory.py", True),
        ("losses/test_pieces.py", False),
        ("serving/test_engine_greedy.py", True),
        ("serving/control/test_engine_greedy.py", False),
        ("nowhere/test_chunked.py", False),
    ],
)
def test_a_stranger_is_seen(test: str, found: bool) -> None:
    assert mirrors(UNIT / test, names_in(source_folder(UNIT / test))) is found


def test_source_files_are_small() -> None:
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in MODULES}
    assert {file: count for file, count in lines.items() if count > LARGEST_FILE} == {}
    assert statistics.median(lines.values()) <= MEDIAN_FILE
    benchmarks = {file.name: len(file.read_text().splitlines()) for file in (ROOT / "benchmarks").rglob("*.py")}
    assert {file: count for file, count in benchmarks.items() if count > LARGEST_FILE} == {}


def test_test_files_are_small() -> None:
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in UNIT.rglob("*.py")}
    assert {file: count for file, count in lines.items() if count > MOST_TEST_LINES} == {}


def test_nine_functions_in_ten_are_short() -> None:
    sizes = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in MODULES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert sizes[int(0.9 * len(sizes))] <= LONGEST_OF_NINE_IN_TEN


def docstrings() -> Iterator[tuple[str, str]]:
    """Place and text of every docstring whose English is this tree's own."""
    for file in MODULES:
        name = str(file.relative_to(ROOT))
        if name.startswith(REWRITTEN_NEXT):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{name}:{getattr(node, 'lineno', 1)}", text


def test_docstrings_open_with_an_answer() -> None:
    assert [place for place, text in docstrings() if text.split()[0].rstrip(",") in QUESTIONS] == []


def test_semicolons_are_rare() -> None:
    texts = [text for _, text in docstrings()]
    assert sum(";" in text for text in texts) <= FEW_SEMICOLONS * len(texts)


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names that a module defines: functions, classes, variables, attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yield attributes, imported names, and the names given to `setattr`, `getattr`, `patch` and their like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TAKE_NAMES:
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (word.rpartition(".")[2] for word in words if isinstance(word, str))


def reached(code: str, ours: set[str]) -> set[str]:
    """Return the private names of ours that a test uses and does not define itself."""
    tree = ast.parse(code)
    return {name for name in names_used(tree) if is_private(name)} & ours - private_names(tree)


def test_no_test_reaches_a_private_name() -> None:
    benchmarks = sorted((ROOT / "benchmarks").rglob("*.py"))
    ours = set().union(*(private_names(ast.parse(file.read_text())) for file in [*MODULES, *benchmarks]))
    ours.discard("_request_id")  # an attribute of OpenAI's client, too
    found = {
        str(file.relative_to(ROOT)): names
        for file in [*sorted((ROOT / "tests").rglob("*.py")), *benchmarks]
        if file != Path(__file__) and (names := reached(file.read_text(), ours))
    }
    assert found == {}, "test by what callers see"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("engine._core.step()", {"_core"}),
        ("from distillspec.serving.engine import _core", {"_core"}),
        ("monkeypatch.setattr(engine, '_core', None)", {"_core"}),
        ("patch('distillspec.serving.engine._core')", {"_core"}),
        ("engine.core.step(); model._third_party", set()),
        ("path = f'results{suffix}'; suffix = '_core'", set()),
        ("class Own:\n    def __init__(self):\n        self._core = 1", set()),
    ],
)
def test_a_reach_is_seen(code: str, found: set[str]) -> None:
    assert reached(code, {"_core"}) == found
