"""A person's path through the page in headless Chromium; screenshots stay with the test's files.

Needs Playwright and Debian's `chromium` (no download); skipped with the reason where one is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import API_KEY, Running, Serve, make_engine, start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 120_000
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Debian's chromium is not installed (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    engine = make_engine(drafts=True, controller="goodput")
    running = start(engine, {}, {})
    yield running
    running.stop()
    engine.close()


def test_a_person_asks_and_sees_where_tokens_came_from(page: Any, live: Running) -> None:
    page.goto(live.url)
    page.wait_for_function("document.getElementById('status').textContent === 'serving'")
    assert page.inner_text("#model") == "tiny"
    page.fill("#prompt", "Hello there")
    page.fill("#most", "30")
    page.click("#send")
    page.wait_for_function("document.getElementById('sum').textContent.includes('accepted')")
    kinds = page.eval_on_selector_all("#answer span", "spans => spans.map(span => span.className)")
    assert len(kinds) == 30
    assert {"accepted", "corrected"} <= set(kinds)
    reply = live.chat("Hello there", max_tokens=30, speculation={"trace": True}).json()
    tokens = reply["choices"][0]["speculation"]["tokens"]
    assert page.text_content("#answer") == "".join(token["text"] for token in tokens)
    page.wait_for_function("document.querySelectorAll('#tokens path').length > 0")
    page.wait_for_function("document.querySelectorAll('#positions rect').length > 0")
    page.wait_for_function("document.querySelector('#versions').innerText.includes('%')")
    assert live.parts.engine.core.proposer.version in page.inner_text("#tiles")  # type: ignore[union-attr]


def test_it_works_by_keyboard_on_a_phone_in_the_dark(page: Any, live: Running) -> None:
    page.set_viewport_size(PHONE)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    page.goto(live.url)
    page.wait_for_function("document.getElementById('status').textContent === 'serving'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    while page.evaluate("document.activeElement.id") != "prompt":
        page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("Hi")
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("200")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#answer span", state="attached")
    page.keyboard.press("Escape")
    page.wait_for_function("!document.getElementById('send').disabled")
    assert page.inner_text("#sum") == "stopped"
    live.wait_until_idle()


def test_a_refusal_is_shown(page: Any, live: Running) -> None:
    page.goto(live.url)
    page.wait_for_function("document.getElementById('status').textContent === 'serving'")
    page.fill("#prompt", "x" * 400)
    page.click("#send")
    page.wait_for_function("document.getElementById('problem').textContent.includes('no room')")


def test_it_asks_for_a_key_where_one_is_needed(page: Any, guarded: Running, serve: Serve) -> None:
    page.goto(guarded.url)
    page.wait_for_selector("#key", state="visible")
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('status').textContent === 'serving'")
    assert not page.is_visible("#key")
