"""The page of a server that learns: acceptance by domain and version, verdicts, trainer, on a phone too."""

from __future__ import annotations

from typing import Any

from distillspec.serving.online.state.layout import TrainerState
from distillspec.serving.online.training.process import run_trainer

from ..browser import PHONE, shows
from ..server.conftest import ADMIN_KEY, wait_for
from .conftest import StartLearning


def test_a_person_sees_the_draft_learn(page: Any, learn: StartLearning) -> None:
    running = learn("decoupled")
    adaptation = running.adaptation
    page.goto(running.url)
    page.fill("#key", ADMIN_KEY)  # with several tenants, drafts and domains are named to the admin alone
    page.keyboard.press("Enter")
    shows(page, "#trainer", "gone")
    running.ask(32, speculation={"domain": "maths"})
    adaptation.writer.flush()
    (candidate,) = run_trainer(adaptation.settings, lambda: False, once=True, judged=True)
    wait_for(lambda: adaptation.registry.get(candidate.name).status == "promoted")
    running.ask(2, speculation={"domain": "maths"})
    shows(page, "#verdicts", candidate.name)
    shows(page, "#verdicts", "gain +")
    shows(page, "#domains", candidate.served_as)
    cells = page.locator("#domains td").all_inner_texts()
    assert cells[0] == "maths"
    assert len(cells) == 3
    assert all(cell.endswith("%") for cell in cells[1:])
    page.wait_for_selector("#rate line.swap", state="attached")
    page.wait_for_selector("#rate path", state="attached")
    shows(page, "#trainer", "updates")

    adaptation.pause()
    TrainerState.read(adaptation.layout.state).with_(quarantined="3 updates in a row").write(adaptation.layout.state)
    shows(page, "#trouble", "quarantined: 3 updates in a row")
    shows(page, "#trouble", "paused")
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    while page.evaluate("document.activeElement.getAttribute('aria-label')") != "Verdicts":
        page.keyboard.press("Tab")  # what scrolls sideways on a phone is reached by keyboard
