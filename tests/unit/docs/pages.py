"""The project's pages and the pieces of them that tests check: links, code spans, code blocks, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
HISTORY = "CHANGELOG.md"  # names what was there once
FOLDERS = ("distillspec", "serving", "conf", "recipes", "tests", "benchmarks", "scripts", "docs")


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @property
    def anchors(self) -> set[str]:
        """Headings as GitHub links to them."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @property
    def spans(self) -> list[str]:
        """Inline code."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    @property
    def rows(self) -> list[list[str]]:
        """The cells of every table row."""
        lines = [line for line in self.prose.splitlines() if line.startswith("|") and not line.startswith("|---")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    @property
    def command_lines(self) -> Iterator[str]:
        """Indented and fenced lines, with lines joined where a backslash continues them."""
        block = re.sub(r" *\\\n\s*", " ", self.text)
        yield from (match[1] for match in re.finditer(r"^    (\S.*)$", block, re.MULTILINE))
        for fence in re.findall(r"^```(?:bash|sh)?\n(.*?)^```$", block, re.MULTILINE | re.DOTALL):
            yield from fence.splitlines()

    def python(self, marker: str = "python") -> list[str]:
        return re.findall(rf"^```{marker}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)


def all_pages() -> list[Page]:
    files = [ROOT / name for name in TOP]
    files += sorted((ROOT / "docs").glob("*.md"))
    files += sorted((ROOT / "recipes").glob("*/README.md"))
    return [Page(file) for file in files]


def page(name: str) -> Page:
    return Page(ROOT / name)
