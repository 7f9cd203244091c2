"""The names, types and values under which /metrics and the dashboard's state show the figures of online adaptation."""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest

from distillspec.serving.server.bridge.online_figures import JudgedVersion, OnlineFigures
from distillspec.serving.server.observability.online_metrics import OnlineMetrics
from distillspec.serving.server.observability.telemetry import Telemetry

FIGURES = OnlineFigures(
    mode="decoupled",
    serving="v00002",
    waiting_for="3 of 12 requests",
    paused=True,
    collapsed=True,
    suspected=True,
    answers=2,
    tokens=3,
    bytes=5,
    waiting_tokens=7,
    logged=11,
    log_cpu_s=0.25,
    dropped={"memory": 13, "deleted": 17},
    refused_shards=19,
    verdicts={"promoted": 23, "refused": 29},
    promotions=31,
    rollbacks=37,
    alarms=41,
    stage="learning",
    problem="3 updates in a row",
    failing="5 times in a row",
    starts=43,
    updates=47,
    trainer_cpu_s={"loading": 53.5, "learning": 71.5},
    cpu_s_per_gained_token=0.5,
    trainer_s=59.5,
    lag=61,
    skipped=67,
    judged=(JudgedVersion("v00002", "promoted", "gain"),),
)
STATE = {
    "mode": "decoupled",
    "serving": "v00002",
    "waiting_for": "3 of 12 requests",
    "paused": True,
    "collapsed": True,
    "suspected": True,
    "answers": 2,
    "tokens": 3,
    "bytes": 5,
    "waiting_tokens": 7,
    "logged": 11,
    "log_cpu_s": 0.25,
    "dropped": {"memory": 13, "deleted": 17},
    "refused_shards": 19,
    "verdicts": {"promoted": 23, "refused": 29},
    "promotions": 31,
    "rollbacks": 37,
    "alarms": 41,
    "stage": "learning",
    "problem": "3 updates in a row",
    "failing": "5 times in a row",
    "starts": 43,
    "updates": 47,
    "trainer_cpu_s": {"loading": 53.5, "learning": 71.5},
    "cpu_s_per_gained_token": 0.5,
    "trainer_s": 59.5,
    "lag": 61,
    "skipped": 67,
    "judged": ({"version": "v00002", "status": "promoted", "reason": "gain"},),
}
METRICS = """
# HELP distillspec:online_enabled 1 with online=on or decoupled
# TYPE distillspec:online_enabled gauge
distillspec:online_enabled{model_name="m"} 1.0
# HELP distillspec:trainer_stage 1 for what the trainer is doing
# TYPE distillspec:trainer_stage gauge
distillspec:trainer_stage{model_name="m",stage="off"} 0.0
distillspec:trainer_stage{model_name="m",stage="gone"} 0.0
distillspec:trainer_stage{model_name="m",stage="elsewhere"} 0.0
distillspec:trainer_stage{model_name="m",stage="waiting_for_text"} 0.0
distillspec:trainer_stage{model_name="m",stage="starting"} 0.0
distillspec:trainer_stage{model_name="m",stage="waiting"} 0.0
distillspec:trainer_stage{model_name="m",stage="judging"} 0.0
distillspec:trainer_stage{model_name="m",stage="selecting"} 0.0
distillspec:trainer_stage{model_name="m",stage="loading"} 0.0
distillspec:trainer_stage{model_name="m",stage="learning"} 1.0
distillspec:trainer_stage{model_name="m",stage="saving"} 0.0
distillspec:trainer_stage{model_name="m",stage="registering"} 0.0
distillspec:trainer_stage{model_name="m",stage="paused"} 0.0
distillspec:trainer_stage{model_name="m",stage="quarantined"} 0.0
distillspec:trainer_stage{model_name="m",stage="failing"} 0.0
# HELP distillspec:online_paused 1 while logging and training are paused by hand
# TYPE distillspec:online_paused gauge
distillspec:online_paused{model_name="m"} 1.0
# HELP distillspec:trainer_updates_total Updates made
# TYPE distillspec:trainer_updates_total counter
distillspec:trainer_updates_total{model_name="m"} 47.0
# HELP distillspec:trainer_starts_total Starts of the embedded trainer's process
# TYPE distillspec:trainer_starts_total counter
distillspec:trainer_starts_total{model_name="m"} 43.0
# HELP distillspec:trainer_cpu_seconds_total Processor time of judging and of updates that ended
# TYPE distillspec:trainer_cpu_seconds_total counter
distillspec:trainer_cpu_seconds_total{model_name="m",work="loading"} 53.5
distillspec:trainer_cpu_seconds_total{model_name="m",work="judging"} 0.0
distillspec:trainer_cpu_seconds_total{model_name="m",work="learning"} 71.5
# HELP distillspec:trainer_cpu_seconds_per_gained_token Its processor time by tokens that learning gained, NaN for none
# TYPE distillspec:trainer_cpu_seconds_per_gained_token gauge
distillspec:trainer_cpu_seconds_per_gained_token{model_name="m"} 0.5
# HELP distillspec:trainer_seconds_total Wall time of updates
# TYPE distillspec:trainer_seconds_total counter
distillspec:trainer_seconds_total{model_name="m"} 59.5
# HELP distillspec:trainer_lag_answers Logged answers it has not considered
# TYPE distillspec:trainer_lag_answers gauge
distillspec:trainer_lag_answers{model_name="m"} 61.0
# HELP distillspec:trainer_skipped_answers_total Answers it had no time for
# TYPE distillspec:trainer_skipped_answers_total counter
distillspec:trainer_skipped_answers_total{model_name="m"} 67.0
# HELP distillspec:replay_answers Answers in the replay log
# TYPE distillspec:replay_answers gauge
distillspec:replay_answers{model_name="m"} 2.0
# HELP distillspec:replay_tokens Their tokens
# TYPE distillspec:replay_tokens gauge
distillspec:replay_tokens{model_name="m"} 3.0
# HELP distillspec:replay_bytes Their bytes on disk
# TYPE distillspec:replay_bytes gauge
distillspec:replay_bytes{model_name="m"} 5.0
# HELP distillspec:replay_waiting_tokens Tokens in memory that wait to be written
# TYPE distillspec:replay_waiting_tokens gauge
distillspec:replay_waiting_tokens{model_name="m"} 7.0
# HELP distillspec:replay_logged_answers_total Answers taken into the log
# TYPE distillspec:replay_logged_answers_total counter
distillspec:replay_logged_answers_total{model_name="m"} 11.0
# HELP distillspec:replay_cpu_seconds_total Processor time of recording and writing, from above
# TYPE distillspec:replay_cpu_seconds_total counter
distillspec:replay_cpu_seconds_total{model_name="m"} 0.25
# HELP distillspec:replay_dropped_answers_total Answers left out of the log
# TYPE distillspec:replay_dropped_answers_total counter
distillspec:replay_dropped_answers_total{model_name="m",reason="memory"} 13.0
distillspec:replay_dropped_answers_total{model_name="m",reason="queue"} 0.0
distillspec:replay_dropped_answers_total{model_name="m",reason="disk"} 0.0
distillspec:replay_dropped_answers_total{model_name="m",reason="error"} 0.0
distillspec:replay_dropped_answers_total{model_name="m",reason="incomplete"} 0.0
distillspec:replay_dropped_answers_total{model_name="m",reason="capped"} 0.0
distillspec:replay_dropped_answers_total{model_name="m",reason="redacted"} 0.0
distillspec:replay_dropped_answers_total{model_name="m",reason="deleted"} 17.0
# HELP distillspec:replay_refused_shards_total Files of the log found damaged or foreign
# TYPE distillspec:replay_refused_shards_total counter
distillspec:replay_refused_shards_total{model_name="m"} 19.0
# HELP distillspec:draft_promotions_total Versions promoted, by the gate or by hand
# TYPE distillspec:draft_promotions_total counter
distillspec:draft_promotions_total{model_name="m"} 31.0
# HELP distillspec:draft_rollbacks_total Versions rolled back, by themselves or by hand
# TYPE distillspec:draft_rollbacks_total counter
distillspec:draft_rollbacks_total{model_name="m"} 37.0
# HELP distillspec:gate_verdicts_total Candidates judged
# TYPE distillspec:gate_verdicts_total counter
distillspec:gate_verdicts_total{decision="promoted",model_name="m"} 23.0
distillspec:gate_verdicts_total{decision="inconclusive",model_name="m"} 0.0
distillspec:gate_verdicts_total{decision="refused",model_name="m"} 29.0
# HELP distillspec:acceptance_collapsed 1 while acceptance is a part of what it was
# TYPE distillspec:acceptance_collapsed gauge
distillspec:acceptance_collapsed{model_name="m"} 1.0
# HELP distillspec:draft_suspected 1 while a draft is suspected: worse than before, or not judged
# TYPE distillspec:draft_suspected gauge
distillspec:draft_suspected{model_name="m"} 1.0
# HELP distillspec:online_alarms_total Alarms of online adaptation
# TYPE distillspec:online_alarms_total counter
distillspec:online_alarms_total{model_name="m"} 41.0
"""


def exposition(figures: OnlineFigures | None = None) -> str:
    """The text of /metrics for the figures alone."""
    metrics, registry = OnlineMetrics("distillspec:", "m"), CollectorRegistry()
    if figures is not None:
        metrics.figures = figures
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_each_figure_is_exposed_under_its_name() -> None:
    assert exposition(FIGURES) == METRICS.lstrip()


def test_a_server_that_does_not_adapt_exposes_the_same_series() -> None:
    idle = exposition().splitlines()
    assert [line.rpartition(" ")[0] for line in idle if line[0] != "#"] == [
        line.rpartition(" ")[0] for line in METRICS.split("\n") if line and line[0] != "#"
    ]
    assert [line for line in idle if line.endswith(" 1.0")] == [
        'distillspec:trainer_stage{model_name="m",stage="off"} 1.0'
    ]


def test_the_dashboard_has_each_figure_under_its_name() -> None:
    telemetry = Telemetry(slots=2)
    telemetry.online = FIGURES
    assert telemetry.state()["online"] == STATE == asdict(FIGURES)
    assert all(type(STATE[name]) is type(value) for name, value in telemetry.state()["online"].items())
