"""A person's path through the page in headless Chromium (see `browser`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distillspec.serving.server.observability.telemetry import TREES

from ...browser import PHONE, shows
from ...conftest import ticks
from ..conftest import API_KEY, Running, Serve, held_at, make_engine, start


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    engine = make_engine(drafts=True, controller="goodput", measure_costs_s=0)
    engine.clock = ticks()
    running = start(engine, {}, {})
    yield running
    running.stop()
    engine.close()


def test_a_person_asks_and_sees_where_tokens_came_from(page: Any, live: Running) -> None:
    page.goto(live.url)
    shows(page, "#status", "serving")
    assert page.inner_text("#model") == "tiny"
    page.fill("#prompt", "Hello there")
    page.fill("#most", "30")
    page.click("#send")
    shows(page, "#sum", "drafted tokens accepted")
    kinds = page.eval_on_selector_all("#answer span", "spans => spans.map(span => span.className)")
    assert len(kinds) == 30
    assert {"plain", "corrected"} <= set(kinds) <= {"accepted", "corrected", "bonus", "plain"}
    shows(page, "#sum", f"; {kinds.count('accepted')} of ")
    reply = live.chat("Hello there", max_tokens=30, speculation={"trace": True}).json()
    tokens = reply["choices"][0]["speculation"]["tokens"]
    assert page.text_content("#answer") == "".join(token["text"] for token in tokens)
    page.wait_for_selector("#tokens path", state="attached")
    page.wait_for_selector("#positions rect", state="attached")
    shows(page, "#versions", "%")
    assert live.state.engine.draft_version in page.inner_text("#tiles")


def test_it_works_by_keyboard_on_a_phone_in_the_dark(page: Any, live: Running) -> None:
    page.set_viewport_size(PHONE)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    page.goto(live.url)
    shows(page, "#status", "serving")
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
    with held_at(live, 1):  # the answer could else end before the key arrives
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#answer span", state="attached")
        page.keyboard.press("Escape")
        shows(page, "#sum", "stopped")
    live.wait_until_idle()


def test_a_refusal_is_shown(page: Any, live: Running) -> None:
    page.goto(live.url)
    shows(page, "#status", "serving")
    page.fill("#prompt", "x" * 400)
    page.click("#send")
    shows(page, "#problem", "no room")
    assert page.is_visible("#problem")


def test_it_asks_for_a_key_where_one_is_needed(page: Any, guarded: Running, serve: Serve) -> None:
    page.goto(guarded.url)
    page.wait_for_selector("#key", state="visible")
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    shows(page, "#status", "serving")
    assert not page.is_visible("#key")


def test_a_server_without_adaptation_says_how_to_begin(page: Any, live: Running) -> None:
    page.goto(live.url)
    shows(page, "#offline", "online=on")
    assert not page.is_visible("#adapting")


def test_the_last_trees_are_drawn_with_their_accepted_paths(page: Any, live: Running) -> None:
    wide, deep = {"parents": (-1, 0, -1, 0, 2, 2), "path": (2, 5)}, {"parents": (-1, 0, 1, 0), "path": ()}
    trees = [wide, deep] * (TREES // 2)
    live.state.telemetry.trees.extend(trees)
    page.goto(live.url)
    page.wait_for_selector("#trees circle", state="attached")
    assert page.locator("#trees line").count() == sum(len(tree["parents"]) for tree in trees)
    assert page.locator("#trees line.taken").count() == sum(len(tree["path"]) for tree in trees)
    spots = page.eval_on_selector_all(
        "#trees circle", "all => all.map(one => `${one.cx.baseVal.value} ${one.cy.baseVal.value}`)"
    )
    assert len(set(spots)) == len(spots) == sum(1 + len(tree["parents"]) for tree in trees), "a node hides another"
