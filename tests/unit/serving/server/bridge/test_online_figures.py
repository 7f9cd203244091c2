"""One declaration a figure: its metric, its place in /admin/online, its use on the page."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.resources import files
from typing import Any

import pytest

from distillspec.serving.server.bridge.online_figures import OnlineFigures, declarations, set_in_status


def test_each_field_is_declared_and_each_metric_once() -> None:
    declared = declarations()
    assert list(declared) == [field.name for field in fields(OnlineFigures)]
    metrics = [figure.metric for figure in declared.values() if figure.metric is not None]
    assert len(metrics) == len(set(metrics)) == 22
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


def test_the_page_reads_only_declared_figures() -> None:
    page = files("distillspec.serving.server.routes").joinpath("dashboard.html").read_text(encoding="utf-8")
    (function,) = re.findall(r"^function online\(\) \{\n.*?^\}", page, re.DOTALL | re.MULTILINE)
    used = set(re.findall(r"\bo\.(\w+)", function))
    assert len(used) > 10
    assert used - {field.name for field in fields(OnlineFigures)} == set()
