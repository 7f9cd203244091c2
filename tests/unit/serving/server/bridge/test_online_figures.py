"""One declaration a figure: its metric, its place in /admin/online, its use on the page."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import Any

import pytest

from distillspec.serving.server.bridge.figure import Tile, counter
from distillspec.serving.server.bridge.online_figures import (
    OnlineFigures,
    declarations,
    set_in_status,
    tiles,
    troubles,
    without_names,
)


def test_each_field_is_declared_and_each_metric_once() -> None:
    declared = declarations()
    assert list(declared) == [field.name for field in fields(OnlineFigures)]
    metrics = [figure.metric for figure in declared.values() if figure.metric is not None]
    assert len(metrics) == len(set(metrics)) == 24
    assert {name for name, figure in declared.items() if figure.metric is None} == {
        name for name, figure in declared.items() if figure.kind == "text"
    }


@pytest.mark.parametrize("name", [name for name, figure in declarations().items() if figure.unit is not None])
def test_a_metric_ends_with_its_unit(name: str) -> None:
    figure = declarations()[name]
    assert figure.metric is not None
    assert figure.metric.endswith(f"_{figure.unit}")


def test_figures_are_put_in_their_places_of_the_status() -> None:
    status: dict[str, Any] = {"canary": "v2", "trainer": {"pid": 7, "lag": 0}, "suspected": "less accepted"}
    set_in_status(OnlineFigures(mode="on", lag=3, answers=5, problem="NaN", suspected=True), status)
    assert (status["mode"], status["canary"], status["suspected"]) == ("on", "v2", "less accepted")
    trainer = status["trainer"]
    assert (trainer["pid"], trainer["lag"], trainer["quarantined"], trainer["paused"]) == (7, 3, "NaN", False)
    assert status["log"]["answers"] == 5


LEARNING = OnlineFigures(
    mode="on",
    stage="waiting_for_text",
    updates=3,
    starts=1,
    trainer_cpu_s={"loading": 0.5, "learning": 0.25},
    cpu_s_per_gained_token=0.004,
    lag=7,
    answers=12,
    bytes=3 << 19,
    dropped={"queue": 2, "disk": 3},
    promotions=2,
    rollbacks=1,
    serving="v00002",
    verdicts={"inconclusive": 4, "promoted": 2},
)


def test_the_tiles_show_the_declared_figures() -> None:
    assert tiles(LEARNING) == [
        ("trainer", "waiting for text"),
        ("updates", "3"),
        ("starts", "1"),
        ("processor time", "500 ms loading, 0.0 ms judging, 250 ms learning"),
        ("per token gained", "4.0 ms"),
        ("answers to learn from", "7"),
        ("log", "12 answers, 1.5 MiB"),
        ("left out of the log", "5"),
        ("promoted", "2"),
        ("rolled back", "1"),
        ("serving", "v00002"),
        ("gate", "4 inconclusive, 0 refused"),
    ]
    waiting = replace(LEARNING, waiting_for="3 of 24 held-out requests", serving=None)
    assert tiles(waiting)[-2:] == [("serving", "–"), ("gate", "waits: has 3 of 24 held-out requests")]
    assert ("per token gained", "–") in tiles(OnlineFigures())


def test_a_new_figure_brings_its_tile_its_trouble_and_its_place() -> None:
    @dataclass(frozen=True)
    class More(OnlineFigures):
        stalls: int = counter("trainer_stalls", "stalls", "Stalls", tile=Tile("stalls"), trouble="It stalled {} times.")

    assert tiles(More(stalls=2))[-1] == ("stalls", "2")
    assert troubles(More(stalls=2)) == ["It stalled 2 times."]
    assert troubles(More()) == []


def test_troubles_stand_in_sentences() -> None:
    assert troubles(LEARNING) == []
    assert troubles(replace(LEARNING, problem="NaN", failing="5 times", paused=True, collapsed=True)) == [
        "The trainer is quarantined: NaN",
        "The trainer keeps ending: 5 times",
        "Logging and training are paused.",
        "Acceptance has collapsed.",
    ]


def test_the_page_names_no_tile_itself() -> None:
    page = files("distillspec.serving.server.routes").joinpath("dashboard.html").read_text(encoding="utf-8")
    (function,) = re.findall(r"^function online\(\) \{\n.*?^\}", page, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"\bo\.(\w+)", function)) == {"mode", "judged"}
    assert [label for label, _ in tiles(LEARNING) if f'["{label}"' in function] == []


@pytest.mark.parametrize("name", [name for name, figure in declarations().items() if figure.kind == "text"])
def test_no_text_is_shown_without_names(name: str) -> None:
    named: dict[str, Any] = {name: "v1 of the merger"}
    shown = without_names(replace(LEARNING, **named))
    assert "merger" not in f"{shown} {tiles(shown)} {troubles(shown)}"
    assert bool(troubles(shown)) == (name in ("problem", "failing")), "that the trainer has trouble is shown to all"
    assert (shown.stage, shown.updates, shown.verdicts) == (LEARNING.stage, LEARNING.updates, LEARNING.verdicts)
