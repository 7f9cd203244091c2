"""Headless Chromium for tests of the page; screenshots stay with the test's files.

Needs Playwright and Debian's `chromium` (no download); skipped with the reason where one is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 120_000
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Debian's chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that fails the test where it loads from elsewhere or throws; a screenshot is kept at the end."""
    made = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    made.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    asked: list[str] = []
    made.on("request", lambda sent: asked.append(sent.url))
    yield made
    folder = Path(os.environ.get("DISTILLSPEC_ARTIFACTS", tmp_path))
    made.screenshot(path=folder / f"{request.node.name}.png", full_page=True)
    made.close()
    assert problems == []
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in asked)


def shows(page: Any, place: str, text: str) -> None:
    """Wait for a text, by Playwright's own means: the page's policy forbids `eval`."""
    from playwright.sync_api import expect

    expect(page.locator(place)).to_contain_text(text, timeout=PATIENCE_MS)
