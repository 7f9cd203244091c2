"""/admin/drafts of a server with several drafts, and what it shows of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving import Engine, EngineSettings
from distillspec.serving.server.bridge.catalogue import PoolCatalogue
from distillspec.serving.server.http.keys import KeyRing

from ...browser import shows
from ..conftest import ADMIN_KEY, SMALL, Running, start
from .test_admin import call

NAMES = ("one", "two", "three")
RANDOM, GOODPUT = {"selection": "random"}, {"selection": "goodput"}
# Whichever draft is faster, both are drawn. All 24 requests have the faster one alone once in millions of runs.
LBSS = {"selection": "lbss", "selection_options": {"chunks": 64}}
ALL_DRAWN = {"selection": "epsilon_greedy", "selection_options": {"epsilon": 1.0}}


@pytest.fixture
def pooled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server with the drafts one and two, and a folder that has three too. Its parameter has engine settings."""
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    drafts = {name: initialise_draft(DraftConfig(layers=layers), target) for layers, name in enumerate(NAMES, 1)}
    for name, draft in drafts.items():
        save_draft(draft, tmp_path / name, target)
    loaded = {name: drafts[name] for name in NAMES[:2]}
    engine = Engine(target, loaded, EngineSettings(**SMALL, **getattr(request, "param", RANDOM)))
    catalogue = PoolCatalogue(engine, {name: tmp_path / name for name in loaded}, str(tmp_path))
    running = start(engine, {"admin": KeyRing([("admin", ADMIN_KEY)]), "catalogue": catalogue}, {})
    yield running
    running.stop()
    engine.close()


def current(running: Running) -> dict[str, bool]:
    return {entry["name"]: entry["current"] for entry in call(running, "GET", "drafts")["drafts"]}


def test_drafts_are_loaded_and_unloaded_by_name(pooled: Running) -> None:
    assert current(pooled) == {"one": True, "two": True, "three": False}
    quiet = pooled.complete(max_tokens=20).json()
    version = call(pooled, "POST", "drafts/load", {"draft": "three"})["version"]
    for name in ("one", "two"):
        assert call(pooled, "POST", "drafts/unload", {"draft": name}) == {"unloaded": name, "switched": True}
    after = pooled.complete(max_tokens=20).json()
    assert after["choices"] == quiet["choices"]
    assert after["speculation"]["draft_versions"] == [version]
    assert list(after["speculation"]["sources"]) == ["three"]
    assert current(pooled) == {"one": False, "two": False, "three": True}
    assert call(pooled, "POST", "drafts/load", {"draft": "one"})["version"]
    pooled.complete()
    assert current(pooled)["one"]


@pytest.mark.parametrize(
    ("path", "name", "code"),
    [
        ("load", "../one", 404),
        ("load", "nothing", 404),
        ("unload", "three", 404),
        ("unload", "", 400),
        ("promote", "one", 501),
        ("rollback", None, 501),
    ],
)
def test_what_is_not_there_is_refused(pooled: Running, path: str, name: str | None, code: int) -> None:
    status, error = call(pooled, "POST", f"drafts/{path}", None if name is None else {"draft": name})
    assert status == code, error
    assert list(pooled.state.engine.drafts) == ["one", "two"]


def test_a_server_of_one_draft_unloads_none(pooled: Running, serve: Any, tmp_path: Path) -> None:
    from distillspec.serving.server.bridge.catalogue import FolderCatalogue

    admin = KeyRing([("admin", ADMIN_KEY)])
    one = serve(engine={"drafts": True}, admin=admin, catalogue=lambda own: FolderCatalogue(own, tmp_path, None))
    status, error = call(one, "POST", "drafts/unload", {"draft": "one"})
    assert (status, "drafts=[…]" in error["message"]) == (501, True)


def test_metrics_and_dashboard_tell_drafts_apart(pooled: Running) -> None:
    for number in range(12):
        assert pooled.complete(prompt=f"abc {number}", max_tokens=12).status_code == 200
    pooled.wait_until_idle()
    text = pooled.state.metrics.text().decode()
    counts = {name: value(text, "selected_answers_total", name) for name in ("one", "two")}
    assert sum(counts.values()) == 12
    assert all(counts.values())
    assert sum(value(text, "selected_tokens_total", name) for name in ("one", "two")) > 12 * 8
    assert value(text, "selected_draft_seconds_total", "one") > 0
    assert all(value(text, "selected_row_seconds_total", name) > 0 for name in ("one", "two"))
    assert 'selection_step_seconds{model_name="' in text
    assert pooled.state.metrics.selection.steps()["usual"]["0.5"] > 0
    table = pooled.state.metrics.selection.table()
    assert {own["draft"]: own["share"] for own in table} == {name: count / 12 for name, count in counts.items()}
    versions = {draft.identity.version for draft in pooled.state.engine.drafts.values()}
    assert value(text, "draft_healthy", "one") == 1
    assert 'drafts_healthy{model_name="tiny"} 2.0' in text
    assert all(f'draft_info{{draft_version="{version}"' in text for version in versions)
    assert pooled.complete(speculation={"draft": versions.pop()}).status_code == 200
    assert pooled.complete(speculation={"draft": "other"}).status_code == 400


def value(text: str, metric: str, draft: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f'distillspec:{metric}{{draft="{draft}"')]
    return float(line.split()[-1])


def serve_some(running: Running, requests: int = 12) -> None:
    for number in range(requests):
        assert running.complete(prompt=f"abc {number}", max_tokens=12).status_code == 200
    running.wait_until_idle()


def test_acceptance_and_health_are_there_for_the_page(pooled: Running) -> None:
    serve_some(pooled)
    rates, own = pooled.state.telemetry.rates(), pooled.state.metrics.selection
    assert set(rates) == {"one", "two"}
    assert all(rate is not None and 0 <= rate <= 1 for rate in rates.values())
    assert {each["draft"]: each["healthy"] for each in own.table()} == {"one": True, "two": True}


def sums(running: Running) -> dict[str, float]:
    """The metrics of what trials wrote and choices cost, as far as they are there."""
    pattern = re.compile(r"^distillspec:selection_(\w+)_tokens_total\{.*\} (\S+)$", re.MULTILINE)
    return {name: float(own) for name, own in pattern.findall(running.state.metrics.text().decode())}


@pytest.mark.parametrize("pooled", [LBSS, ALL_DRAWN], ids=["lbss", "epsilon_greedy"], indirect=True)
def test_real_trials_are_counted_with_what_they_cost(pooled: Running) -> None:
    serve_some(pooled, 24)
    own, found = pooled.state.metrics.selection, sums(pooled)
    assert set(found) == {"explored", "lost", "regret"}
    assert 0 < found["explored"] <= sum(own.figures.tokens.values())
    assert 0 < found["lost"] <= found["regret"], "no two drafts are just as fast"
    trials = own.trials()
    assert trials is not None
    tokens = sum(own.figures.tokens.values())
    assert trials == {
        "explored": found["explored"] / tokens,
        "lost": found["lost"] / (tokens + found["lost"]),
        "regret": found["regret"] / (tokens + found["regret"]),
    }


@pytest.mark.parametrize(("pooled", "there"), [(RANDOM, set()), (GOODPUT, {"lost"})], indirect=["pooled"])
def test_what_is_not_estimated_is_absent(pooled: Running, there: set[str]) -> None:
    serve_some(pooled)
    assert set(sums(pooled)) == {"explored"} | there
    trials = pooled.state.metrics.selection.trials()
    assert trials is not None
    assert {name for name, share in trials.items() if share is not None} == {"explored"} | there


def test_the_page_shows_what_each_draft_brings_and_that_costs_are_not_estimated(page: Any, pooled: Running) -> None:
    serve_some(pooled)
    rates = pooled.state.telemetry.rates()
    page.goto(pooled.url)
    shows(page, "#drafts", "acceptance")
    for name, rate in rates.items():
        assert rate is not None
        shows(page, "#drafts", shown(rate))
        shows(page, "#drafts", name)
    shows(page, "#draft-steps", "trials wrote 0.0 % of the tokens")
    shows(page, "#draft-steps", "cost of trials: not estimated; regret of all choices: not estimated")


@pytest.mark.parametrize("pooled", [LBSS], ids=["lbss"], indirect=True)
def test_the_page_shows_what_real_trials_cost(page: Any, pooled: Running) -> None:
    serve_some(pooled)
    trials = pooled.state.metrics.selection.trials()
    assert trials is not None
    explored, lost, regret = (trials[name] for name in ("explored", "lost", "regret"))
    assert explored
    assert lost
    assert regret
    page.goto(pooled.url)
    shows(page, "#draft-steps", f"trials wrote {shown(explored)} of the tokens")
    costs = f"cost of trials: {shown(lost)} of tokens/s; regret of all choices: {shown(regret)} of tokens/s"
    shows(page, "#draft-steps", costs)


def shown(share: float) -> str:
    return f"{100 * share + 1e-9:.1f} %"  # a browser rounds halves up
