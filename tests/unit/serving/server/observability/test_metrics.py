"""Metrics exist before anything happened, count what happened, and are what the documents and dashboards name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import chain_of
from distillspec.serving.server.bridge.engine_thread import StepReport
from distillspec.serving.server.observability.metrics import Metrics
from distillspec.serving.server.observability.telemetry import Telemetry
from distillspec.serving.step.output import StepOutput

from ..conftest import Running, Serve

ROOT = Path(__file__).parents[5]
DEPLOY = ROOT / "serving" / "deploy"
NAME = re.compile(r"distillspec:[a-z0-9_]+")


def samples(text: bytes) -> dict[str, float]:
    """`name{label="value",…}` → value, labels sorted, the model's left out."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def families(text: bytes) -> set[str]:
    names = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    return {name for name in names if not name.endswith("_created")}  # the library's own, of every counter


@pytest.fixture(scope="module")
def untouched() -> bytes:
    return Metrics("m", speculation_length=4, slots=2, cache_tokens=100).text()


def test_everything_is_registered_from_the_start(untouched: bytes, served: Running) -> None:
    served.complete(max_tokens=20)
    served.complete(tempratur=1)
    assert families(served.http.get("/metrics").content) == families(untouched)
    start = samples(untouched)
    assert start["distillspec:spec_decode_num_accepted_tokens_per_pos_total{position=3}"] == 0
    assert start["distillspec:request_success_total{finished_reason=abort}"] == 0
    assert start["distillspec:requests_refused_total{reason=queue_full}"] == 0
    assert start["distillspec:draft_info{draft_version=}"] == 1


def test_counts_are_what_happened(serve: Serve) -> None:
    running = serve(engine={"drafts": True})
    body = running.complete(max_tokens=30, n=2, temperature=1, seed=1).json()
    running.complete(tempratur=1)
    running.wait_until_idle()
    seen = samples(running.http.get("/metrics").content)
    report = body["speculation"]
    assert seen["distillspec:generation_tokens_total"] == body["usage"]["completion_tokens"]
    assert seen["distillspec:spec_decode_num_draft_tokens_total"] == report["proposed"] > 0
    assert seen["distillspec:spec_decode_num_accepted_tokens_total"] == report["accepted"] > 0
    by_position = [
        seen[f"distillspec:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}}"] for place in range(4)
    ]
    assert by_position == report["accepted_per_position"]
    assert seen["distillspec:request_success_total{finished_reason=length}"] == 2
    assert seen["distillspec:e2e_request_latency_seconds_count"] == 2
    assert seen["distillspec:requests_refused_total{reason=invalid}"] == 1
    assert seen["distillspec:http_requests_total{route=/v1/completions,status=200}"] == 1
    assert seen["distillspec:num_requests_running"] == 0
    prompt = body["usage"]["prompt_tokens"]
    assert seen["distillspec:prefix_cache_queries_total"] == 2 * prompt >= seen["distillspec:prefix_cache_hits_total"]


def step(emitted: int, seconds: float, predicted: tuple[float, float] | None, prefill: int = 0) -> StepReport:
    """Return a step of one row that emitted so many tokens. `predicted`: (tokens, seconds) of its plan."""
    view = BatchView((RowView("a/0", 100, 4),), prefill)
    plan = Plan((RowPlan("a/0", chain_of(3)),), *(predicted or (None, None)))
    row = RowResult.chain("a/0", depth=3, accepted=emitted - 1, emitted=emitted)
    result = StepResult((row,), view, plan, prefill, 0.25 * seconds, 0.5 * seconds, seconds)
    return StepReport(StepOutput(result=result), running=1, waiting=0, cached_tokens=100, versions={"draft": "v"})


def test_goodput_is_shown_beside_what_was_predicted_of_it() -> None:
    metrics, telemetry = Metrics("m", speculation_length=4, slots=2, cache_tokens=100), Telemetry(slots=2)
    # Goodput leaves out steps with prefill. A plan without predictions adds none.
    for report in (
        step(4, 0.1, (3.0, 0.12)),
        step(1, 0.3, (2.4, 0.08)),
        step(4, 9.0, (4.0, 9.0), 50),
        step(2, 0.1, None),
    ):
        metrics.observe_step(report)
        telemetry.observe_step(report)
    seen = samples(metrics.text())
    assert seen["distillspec:goodput_tokens_per_second"] == pytest.approx(2 / 0.1)  # of the last step
    assert seen["distillspec:goodput_predicted_tokens_per_second"] == pytest.approx(2.4 / 0.08)
    second = telemetry.point()
    assert second["goodput"] == pytest.approx((4 + 1 + 2) / (0.1 + 0.3 + 0.1))  # of the second's steps together
    assert second["predicted_goodput"] == pytest.approx((3.0 + 2.4) / (0.12 + 0.08))
    assert second["acceptance"] == pytest.approx((3 + 0 + 3 + 1) / (3 + 1 + 3 + 2))
    empty = telemetry.point()
    assert empty["goodput"] is empty["predicted_goodput"] is None


def test_rows_of_a_step_are_added_up() -> None:
    metrics = Metrics("m", speculation_length=4, slots=4, cache_tokens=100)
    rows = (
        RowResult.chain("a/0", 3, 0, 1, domain="maths"),
        RowResult.chain("b/0", 3, 1, 2, domain="maths"),
        RowResult.chain("c/0", 4, 3, 4, domain="code"),
        RowResult.chain("d/0", 0, 0, 1),
    )
    view = BatchView(tuple(RowView(row.sequence_id, 100, 4) for row in rows))
    result = StepResult(
        rows, view, Plan(tuple(RowPlan(row.sequence_id, chain_of(row.depth)) for row in rows)), 0, 0, 1, 1
    )
    metrics.observe_step(StepReport(StepOutput(result=result), 4, 0, 100, {"draft": "v"}))
    seen = samples(metrics.text())
    assert seen["distillspec:spec_decode_num_drafts_total"] == 3
    assert seen["distillspec:spec_decode_num_draft_tokens_total"] == 3 + 3 + 4
    assert seen["distillspec:spec_decode_num_accepted_tokens_total"] == 1 + 3
    kept = [seen[f"distillspec:spec_decode_num_accepted_tokens_per_pos_total{{position={n}}}"] for n in range(4)]
    assert kept == [2, 1, 1, 0]
    judged = {
        domain: [
            seen[f"distillspec:draft_tokens_{what}_total{{domain={domain},draft_version=v}}"]
            for what in ("judged", "accepted")
        ]
        for domain in ("maths", "code")
    }
    assert judged == {"maths": [1 + 2, 1], "code": [4, 3]}


def test_unknown_paths_make_no_new_series(served: Running) -> None:
    for path in ("/a", "/b", "/c/d"):
        served.http.get(path)
    routes = {name for name in samples(served.http.get("/metrics").content) if "route=/" in name}
    assert not any("route=/a" in name or "route=/c" in name for name in routes)


def test_operators_find_every_metric_explained(untouched: bytes) -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    explained = set(NAME.findall(page))
    exposed = families(untouched)
    assert {name.removesuffix("_total") for name in exposed} <= {name.removesuffix("_total") for name in explained}


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "prometheus-alerts.yml", "../../docs/operators.md"])
def test_documents_name_only_metrics_that_exist(untouched: bytes, file: str) -> None:
    names = set(NAME.findall((DEPLOY / file).read_text()))
    exposed = {name.split("{")[0] for name in samples(untouched)} | families(untouched)
    exposed |= {f"{name}_total" for name in families(untouched)} | {"distillspec:http_requests_total"}
    assert len(names) > 5
    assert names - exposed == set()


def test_acceptance_is_of_the_tokens_that_were_judged() -> None:
    """Of all drafted tokens it would fall with every longer plan: those behind a rejection are never tried."""
    alerts = (DEPLOY / "prometheus-alerts.yml").read_text().split("- alert: ")
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shares = [each for each in [*alerts, *queries] if "accepted" in each and "position" not in each]
    assert len(shares) > 3
    assert all(each.count("draft_tokens_accepted_total") == each.count("draft_tokens_judged_total") for each in shares)
    assert not any("spec_decode_num" in each for each in shares)


def test_the_grafana_dashboard_is_whole() -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    assert all(panel["targets"] and all(target["expr"] for target in panel["targets"]) for panel in panels)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "model"}
