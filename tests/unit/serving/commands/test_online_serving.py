"""The server with online adaptation: logging, operators' routes, metrics."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distillspec.models import LanguageModel, load_draft, save_draft
from distillspec.serving.commands.online_serving import DROPPED
from distillspec.serving.online.state.lock import is_held
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.server.bridge.online_figures import DROPS

from ..server.conftest import ADMIN_KEY, wait_for
from .conftest import KEYS, Learning, StartLearning

TRAINER_S = 250.0  # for what a trainer's process does: it imports torch, perhaps beside other tests that do
STATUS = {  # the fields of GET /admin/online. None: its fields are not listed here
    "mode": None,
    "serving": None,
    "waiting_for": None,
    "suspected": None,
    "served": {"versions": None, "short": None, "long": None, "collapsed": None},
    "log": dict.fromkeys(["shards", "bytes", "answers", "tokens", "refused_shards", "waiting_tokens", "cpu_s"]),
    "trainer": dict.fromkeys(
        [
            *("pid", "starts", "stage", "updates", "lag", "learnt", "skipped", "capped", "drop_rate", "cpu_s"),
            *("cpu_s_by_work", "share", "drift", "quarantined", "failing", "paused"),
        ]
    ),
    "gained_tokens": None,
    "cpu_s_per_gained_token": None,
    "device_s_per_gained_token": None,
}
GREEDY = {"model": "tiny", "prompt": "abcabc", "max_tokens": 40, "temperature": 0}


def metric(running: Learning, name: str, **labels: str) -> float:
    """Return the value of one series of /metrics, NaN if there is none."""
    text = running.http.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text  # of several tenants
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"distillspec:{name}" and labels.items() <= sample.labels.items():
                return sample.value
    return float("nan")


def greedy(running: Learning) -> Any:
    reply = running.http.post("/v1/completions", json=GREEDY, headers={"Authorization": f"Bearer {KEYS['alice']}"})
    return reply.json()["choices"]


def test_a_version_is_trained_elsewhere_judged_promoted_and_rolled_back(learn: StartLearning) -> None:
    running = learn("decoupled")
    quiet = greedy(running)
    running.ask(64, speculation={"domain": "maths"})
    running.ask(4, "bob", speculation={"domain": "chat"})
    adaptation = running.adaptation
    adaptation.writer.flush()
    (first,) = running.admin("GET", "drafts")["drafts"]
    assert (first["current"], first["status"]) == (True, "promoted")
    (candidate,) = run_trainer(adaptation.settings, lambda: False, once=True, judged=True)
    wait_for(lambda: adaptation.registry.get(candidate.name).status == "promoted")
    wait_for(lambda: [d["current"] for d in running.admin("GET", "drafts")["drafts"]] == [False, True])
    assert greedy(running) == quiet
    running.ask(4, speculation={"domain": "maths"})
    (verdict,) = running.admin("GET", "online/verdicts")["verdicts"]
    assert (verdict["version"], verdict["decision"]) == (candidate.name, "promoted")
    status = running.admin("GET", "online")
    assert (status["mode"], status["serving"], status["trainer"]["stage"]) == ("decoupled", candidate.name, "gone")
    assert metric(running, "gate_verdicts_total", decision="promoted") == 1
    assert metric(running, "draft_promotions_total") == 1
    assert metric(running, "draft_info", draft_version=candidate.served_as) == 1
    for version, domain in ((first["version"], "chat"), (candidate.served_as, "maths")):
        labels = {"draft_version": version, "domain": domain}
        assert metric(running, "draft_tokens_judged_total", **labels) > 0
        assert metric(running, "draft_tokens_accepted_total", **labels) >= 0
    assert running.admin("POST", "drafts/rollback")["version"] == first["version"]
    assert adaptation.registry.current() == adaptation.registry.get(first["name"])
    assert adaptation.registry.get(candidate.name).status == "rolled_back"
    assert greedy(running) == quiet
    assert metric(running, "draft_rollbacks_total") == 1
    status, error = running.admin("POST", "drafts/rollback")
    assert (status, error["code"]) == (409, "conflict")


def test_drafts_are_tried_and_promoted_by_hand(learn: StartLearning) -> None:
    running = learn("decoupled")
    adaptation = running.adaptation
    adaptation.pause()
    running.ask(8)
    (first,) = adaptation.registry.versions()
    other = load_draft(first.path, running.state.engine.target)
    for parameter in other.model.parameters():
        parameter.data *= 0.5
    second = adaptation.registry.add(lambda folder: _save(other, folder, running))
    adaptation.registry.judged(second.name, "refused", {}, "only for the test")
    quiet = greedy(running)

    def used() -> str:
        return next(d["name"] for d in running.admin("GET", "drafts")["drafts"] if d["current"])

    assert running.admin("POST", "drafts/load", {"draft": second.name})["version"] == second.served_as
    wait_for(lambda: used() == second.name)
    assert adaptation.registry.current() == first  # a restart would take the first
    assert greedy(running) == quiet
    known = adaptation.registry.versions()
    assert running.admin("POST", "drafts/rollback")["version"] == first.served_as
    wait_for(lambda: used() == first.name)
    assert adaptation.registry.versions() == known, "nothing was promoted, and nothing is rolled back"
    assert running.admin("POST", "drafts/rollback")[0] == 409
    assert running.admin("POST", "drafts/promote", {"draft": second.name})["version"] == second.served_as
    promoted = adaptation.registry.current()
    assert promoted is not None
    assert (promoted.name, promoted.status) == (second.name, "promoted")
    assert greedy(running) == quiet
    assert running.admin("POST", "drafts/promote", {"draft": "v00099"})[0] == 404
    assert running.admin("POST", "drafts/load", {"draft": "../given"})[0] == 404
    next(first.path.glob("*.safetensors")).write_bytes(b"nothing")
    status, error = running.admin("POST", "drafts/promote", {"draft": first.name})
    assert (status, error["code"]) == (409, "conflict")
    assert used() == second.name
    assert greedy(running) == quiet


def _save(draft: LanguageModel, folder: Path, running: Learning) -> None:
    save_draft(draft, folder, running.state.engine.target)


def test_every_reason_for_a_dropped_answer_has_a_counter() -> None:
    assert tuple(DROPPED) == DROPS


def test_operators_find_the_same_fields_under_the_same_names(learn: StartLearning) -> None:
    running = learn("decoupled")
    status = running.admin("GET", "online")
    named = {
        name: dict.fromkeys(value) if isinstance(STATUS.get(name), dict) else None for name, value in status.items()
    }
    assert named == STATUS
    (draft,) = running.admin("GET", "drafts")["drafts"]
    assert (status["mode"], status["serving"], status["suspected"]) == ("decoupled", draft["name"], None)
    assert set(running.admin("GET", "replay")) == {*STATUS["log"], "tenants", "excluded"}


def test_excluded_tenants_are_not_logged_and_a_tenant_is_deleted(learn: StartLearning) -> None:
    running = learn("decoupled", replay={"exclude_tenants": ["bob"]})
    running.ask(3)
    running.ask(3, speculation={"log": False})
    running.ask(3, "bob")
    running.adaptation.writer.flush()
    stats = running.admin("GET", "replay")
    assert (stats["answers"], stats["tenants"]) == (3, {"alice": 3})
    running.admin("POST", "online/pause")
    running.ask(2)
    assert running.admin("GET", "online")["trainer"]["paused"] is True
    assert metric(running, "online_paused") == 1
    running.admin("POST", "online/resume")
    running.ask(1)
    running.adaptation.writer.flush()
    assert running.admin("GET", "replay")["answers"] == 4
    assert running.admin("POST", "replay/exclude", {"tenant": "alice"}) == {"tenant": "alice", "excluded": True}
    running.ask(2)
    running.adaptation.writer.flush()
    replay = running.admin("GET", "replay")
    assert (replay["answers"], replay["excluded"]) == (4, ["alice"])
    running.admin("POST", "replay/exclude", {"tenant": "alice", "excluded": False})
    assert running.admin("GET", "replay")["excluded"] == []
    assert running.admin("POST", "replay/delete", {"tenant": "alice"}) == {"tenant": "alice", "deleted": 4}
    assert running.admin("GET", "replay")["tenants"] == {}
    assert metric(running, "replay_answers") == 0
    assert metric(running, "replay_logged_answers_total") == 4


def wait_for_trainer(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + TRAINER_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.timeout(600)
def test_a_trainer_with_nan_weights_is_quarantined_and_reported(learn: StartLearning) -> None:
    """The trainer is a process and is killed once before. Serving goes on."""
    running = learn("on", learning_rate=1e37, max_bad_steps=1, max_bad_updates=2, every_requests=None)
    supervisor = running.adaptation.supervisor
    assert supervisor is not None
    assert metric(running, "trainer_stage", stage="waiting_for_text") == 1
    running.ask(12)
    running.admin("POST", "online/trigger")
    wait_for(lambda: supervisor.pid is not None)
    pid = supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    quiet = greedy(running)
    lock = running.adaptation.layout.trainer / "trainer.lock"
    wait_for_trainer(lambda: supervisor.starts > 1 and is_held(lock))  # not by the one that is being killed
    assert supervisor.starts == 2

    def update() -> bool:
        running.admin("POST", "online/trigger")
        running.ask(1)
        return metric(running, "trainer_stage", stage="quarantined") == 1

    wait_for_trainer(update)
    assert "updates in a row gave no finite draft" in running.admin("GET", "online")["trainer"]["quarantined"]
    assert metric(running, "trainer_starts_total") == 2
    assert "no finite draft" in running.state.telemetry.state()["online"]["problem"]
    assert greedy(running) == quiet
    assert running.admin("POST", "online/resume")["trainer"]["quarantined"] is None
    running.admin("POST", "online/trigger")
    running.ask(1)
    wait_for(lambda: supervisor.pid is not None)
    assert [v.status for v in VersionRegistry(running.adaptation.layout.versions).versions()] == ["promoted"]
