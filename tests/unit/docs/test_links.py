"""Links, headings, files, modules and tests that the pages name exist."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from .pages import FOLDERS, HISTORY, ROOT, Page, all_pages, page

PAGES = all_pages()
MODULE = re.compile(r"\bdistillspec(?:\.\w+)+")
DEFINED = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
}


def missing_links(found: Page) -> list[str]:
    missing = []
    for link in found.links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (found.file.parent / path).resolve() if path else found.file
        if not target.exists() or (anchor and anchor not in Page(target).anchors):
            missing.append(link)
    return missing


def mentioned_paths(found: Page) -> list[str]:
    """Return code spans that are paths of this repository, as in `serving/base/tree.py:12` or `conf/loss/`."""
    words = [word for span in found.spans for word in span.split()]
    paths = [word.strip(",;:()").removeprefix("./").split(":")[0] for word in words]
    return [
        path for path in paths if "/" in path and path.split("/")[0] in FOLDERS and not re.search(r"[A-Z]{3,}$", path)
    ]


def missing_paths(found: Page) -> list[str]:
    def exists(path: str) -> bool:
        if "*" in path or "NAME" in path:
            return any(ROOT.glob(path.replace("NAME", "*")))
        return (ROOT / path).exists() or (found.file.parent / path).exists()

    return [path for path in mentioned_paths(found) if not exists(path)]


def missing_modules(found: Page) -> list[str]:
    names = {name for name in MODULE.findall(found.text) if not name.endswith(".json")}
    return [name for name in sorted(names) if not name.startswith(examples(found)) and not _resolves(name)]


def examples(found: Page) -> tuple[str, ...]:
    """Return the modules that the page's code blocks are to be put into."""
    paths = [code.splitlines()[0].removeprefix("# ").removesuffix(".py") for code in found.python()]
    return tuple(f"distillspec.{path.removeprefix('distillspec/').replace('/', '.')}" for path in paths if "/" in path)


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("found", PAGES, ids=[p.name for p in PAGES])
def test_links_lead_somewhere(found: Page) -> None:
    assert missing_links(found) == []


@pytest.mark.parametrize("found", [p for p in PAGES if p.name != HISTORY], ids=lambda p: p.name)
def test_files_and_modules_that_a_page_names_exist(found: Page) -> None:
    assert missing_paths(found) == []
    assert missing_modules(found) == []


def test_every_benchmark_that_is_a_command_is_listed() -> None:
    commands = [file.name for file in (ROOT / "benchmarks").glob("*.py") if '"__main__"' in file.read_text("utf-8")]
    assert len(commands) > 10
    assert [name for name in sorted(commands) if f"| `{name}` |" not in page("benchmarks/README.md").text] == []


def test_pages_that_code_names_exist() -> None:
    files = [
        file for folder in FOLDERS[:5] for end in ("py", "yaml", "yml") for file in (ROOT / folder).rglob(f"*.{end}")
    ]
    named = {name for file in files for name in re.findall(r"docs/[\w-]+\.md", file.read_text(encoding="utf-8"))}
    assert "docs/operators.md" in named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    to_read = [page("README.md")]
    while to_read:
        current = to_read.pop()
        if current.file in seen:
            continue
        seen.add(current.file)
        targets = [(current.file.parent / link.split("#")[0]).resolve() for link in current.links if "://" not in link]
        to_read += [Page(target) for target in targets if target.suffix == ".md"]
        to_read += [Page(file) for target in targets if target.name == "recipes" for file in target.glob("*/README.md")]
    assert {p.file for p in PAGES} <= seen


def test_every_page_links_to_the_glossary() -> None:
    without = [p.name for p in PAGES if not any(link.endswith("glossary.md") for link in p.links)]
    assert without == ["CHANGELOG.md", "docs/glossary.md"]


def test_failures_that_adaptation_survives_are_tested() -> None:
    rows = [row for row in page("docs/adapting.md").rows if len(row) == 3 and re.fullmatch(r"`[^-]*`", row[2])]
    words = [row[2].strip("`") for row in rows if not row[2].startswith("`./")]
    assert len(words) >= 20
    assert [word for word in words if not any(word in name for name in DEFINED)] == []


def test_a_dead_link_a_lost_file_and_a_lost_module_are_found(tmp_path: Path) -> None:
    lost = tmp_path / "page.md"
    lost.write_text(
        "# Here\n[a](gone.md) [b](#here) [c](#there) `serving/gone.py` `conf/loss/` `runs/a.py`\n"
        "`distillspec.losses.gone` `distillspec.losses.fkl`\n"
    )
    assert missing_links(Page(lost)) == ["gone.md", "#there"]
    assert missing_paths(Page(lost)) == ["serving/gone.py"]
    assert missing_modules(Page(lost)) == ["distillspec.losses.gone"]
