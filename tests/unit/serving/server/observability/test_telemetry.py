"""Figures of the dashboard: acceptance of the drafts in use, times between tokens, JSON that browsers read."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.requests import CompletionOutput, RequestOutput, RequestStats
from distillspec.serving.base.rows import BatchView
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.observability.telemetry import TREES, VERSIONS, Telemetry
from distillspec.serving.step.output import StepOutput

from ..conftest import Serve


def step(rows: Mapping[str, tuple[int, int]], versions: Mapping[str, str]) -> StepReport:
    """Return a step of a row for each source, which accepted so many tokens of a chain of so many."""
    found = tuple(
        RowResult.chain(source, depth=depth, accepted=accepted, emitted=accepted + 1, source=source)
        for source, (accepted, depth) in rows.items()
    )
    return report(found, versions)


def report(rows: tuple[RowResult, ...], versions: Mapping[str, str]) -> StepReport:
    """Return a step of these rows."""
    result = StepResult(rows, BatchView((), 0), Plan(()), 0, 0.0, 0.0, 0.1)
    return StepReport(StepOutput(result=result), running=1, waiting=0, cached_tokens=1, versions=versions)


def finished(tokens: int, first_s: float, total_s: float) -> RequestOutput:
    stats = RequestStats(first_token_s=first_s, finished_s=total_s)
    answer = CompletionOutput(0, tuple(range(tokens)), "", "length", None, None, None, stats)
    return RequestOutput("a", (1,), (answer,))


def test_old_versions_are_forgotten_before_one_that_is_used() -> None:
    telemetry = Telemetry(slots=2)
    for number in range(2 * VERSIONS):
        used = {"a": "steady", "b": f"v{number}"}
        telemetry.observe_step(step({"a": (1, 2), "b": (0, 1)}, used))
    known = telemetry.state()["acceptance"]
    assert len(known) == VERSIONS
    assert known["steady"]["tried"] == 2 * 2 * VERSIONS
    assert f"v{2 * VERSIONS - 1}" in known
    assert "v0" not in known


def test_the_drafts_in_use_are_judged_together() -> None:
    telemetry = Telemetry(slots=2)
    telemetry.observe_step(step({"one": (0, 2)}, {"one": "old"}))
    used = {"one": "v1", "two": "v2"}
    telemetry.observe_step(step({"one": (2, 3), "two": (1, 1), "ngram": (4, 4)}, used))
    state = telemetry.state()
    assert state["draft_version"] == "v1, v2"
    assert set(state["acceptance"]) == {"old", "v1", "v2", ""}
    assert state["in_use"] == {"rate": pytest.approx(3 / 4), "by_position": [1.0, 1.0, 0.0]}


def test_one_version_in_two_places_counts_once() -> None:
    telemetry = Telemetry(slots=2)
    used = {"one": "v", "two": "v", "three": "w"}
    telemetry.observe_step(step({"one": (1, 3), "two": (1, 3), "three": (2, 2)}, used))
    assert telemetry.state()["in_use"] == {"rate": pytest.approx(4 / 6), "by_position": [1.0, pytest.approx(1 / 3)]}
    assert telemetry.state()["acceptance"]["v"]["tried"] == 4


def test_without_a_draft_what_was_looked_up_is_in_use() -> None:
    telemetry = Telemetry(slots=2)
    assert telemetry.state()["in_use"] == {"rate": None, "by_position": []}
    telemetry.observe_step(step({"ngram": (1, 2)}, {}))
    assert telemetry.state()["in_use"] == {"rate": 0.5, "by_position": [1.0, 0.0]}


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    telemetry = Telemetry(slots=2)
    telemetry.observe_finished(finished(1, 0.5, 0.75))
    latency = telemetry.state()["latency"]
    assert latency["time_per_output_token_s"] == {"50": None, "90": None, "99": None}
    assert latency["time_to_first_token_s"]["50"] == 0.5
    assert latency["total_s"]["99"] == 0.75
    telemetry.observe_finished(finished(11, 1.0, 2.0))
    latency = telemetry.state()["latency"]
    assert latency["time_per_output_token_s"] == pytest.approx(dict.fromkeys(("50", "90", "99"), 0.1))
    json.dumps([telemetry.state(), telemetry.point()], allow_nan=False)  # a page stops at NaN


def test_the_drafts_in_use_are_named_before_the_first_step(serve: Serve) -> None:
    running = serve(engine={"drafts": True})
    version = running.state.engine.draft_version
    with running.http.stream("GET", "/dashboard/events") as reply:
        line = next(line for line in reply.iter_lines() if line.startswith("data: "))
    assert json.loads(line.removeprefix("data: "))["state"]["draft_version"] == version
    lines = running.http.get("/metrics").text.splitlines()
    infos = [line for line in lines if line.startswith("distillspec:draft_info")]
    assert infos == [f'distillspec:draft_info{{draft_version="{version}",model_name="tiny"}} 1.0']
    running.complete(max_tokens=5)
    running.wait_until_idle()
    assert running.state.telemetry.state()["swaps"] == []
    assert 'distillspec:draft_swaps_total{model_name="tiny"} 0.0' in running.http.get("/metrics").text


def test_the_last_trees_are_kept_and_no_chains() -> None:
    telemetry = Telemetry(slots=2)
    drafted = [RowResult("a", 2, 3, 1, 2, parents=(-1, -1, number % 2), path=(0,)) for number in range(TREES + 1)]
    for row in (RowResult.chain("b", depth=2, accepted=2, emitted=3), *drafted):
        telemetry.observe_step(report((row,), {}))
    trees = telemetry.state()["trees"]
    assert trees == [{"parents": row.parents, "path": row.path} for row in drafted[1:]]
    assert json.loads(json.dumps(trees))[0] == {"parents": [-1, -1, 1], "path": [0]}
