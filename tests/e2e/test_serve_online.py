"""`distill serve online=on` as a process under traffic: it learns, survives kills, and boots what it promoted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from distillspec.config import DraftConfig, OnlineConfig, ReplayConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving.online.beginning import first_draft
from distillspec.serving.online.layout import Layout, OnlineSettings
from distillspec.serving.online.records import LogKey
from distillspec.serving.online.registry import VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog

PATIENCE_S = 120.0
ADMIN_KEY = "the-admin-key"
SERVE = (
    *("target=tiny", "target.dtype=float32", "target.device=cpu", "server.port=0", "hydra.run.dir=run"),
    *("engine.compile=false", "engine.max_model_len=256", "engine.max_slots=4"),
    *("engine.controller=fixed", "engine.speculation_length=2"),
    *("online.metrics_s=0.5", "replay.share=1", "replay.held_out=0.3", "replay.entries=16", "replay.flush_s=0.2"),
    *("gate.requests=16", "gate.min_requests=8", "gate.bootstrap_samples=200", "gate.busy_share=0.5"),
)
TRAIN = (
    *("adapt.every_requests=20", "adapt.on_drift=false", "adapt.niceness=0", "adapt.learning_rate=3e-3"),
    *("adapt.max_steps=40", "adapt.epochs=12", "adapt.row_tokens=128", "adapt.batch_tokens=256"),
)
GREEDY = [{"model": "tiny", "prompt": text, "max_tokens": 40, "temperature": 0} for text in ("abc", "Hello", "12 + 3")]

REDACTION = "def short_prompts_only(answer):\n    return answer if len(answer.prompt_ids) <= 5 else None\n"


@dataclass
class Server:
    process: subprocess.Popen[str]
    http: httpx.Client
    errors: Path

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        reply = self.http.request(method, f"/admin/{path}", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def greedy(self) -> list[str]:
        return [self.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in GREEDY]

    def metric(self, name: str, label: str = "") -> float:
        found = re.findall(rf"^distillspec:{name}\{{([^}}]*)\}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)

    def used(self) -> str:
        return next(draft["name"] for draft in self.admin("GET", "drafts")["drafts"] if draft["current"])

    def new_trainer(self, known: Sequence[int]) -> int:
        """The process number of a trainer that is none of those known."""
        until = time.monotonic() + PATIENCE_S
        while (pid := self.admin("GET", "online")["trainer"]["pid"] or 0) in (0, *known):
            assert time.monotonic() < until
            time.sleep(0.05)
        return int(pid)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Server]:
    errors = folder / "errors.log"
    with errors.open("a") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "distillspec.cli", "serve", *SERVE, *words],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, "DISTILLSPEC_ADMIN_KEY": ADMIN_KEY},
        )
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert found, errors.read_text()
        with httpx.Client(base_url=found[0], timeout=PATIENCE_S, trust_env=False) as http:
            yield Server(process, http, errors)
    finally:
        process.kill()
        process.communicate()


class Traffic:
    """Two clients that never pause; every request must be answered in full."""

    def __init__(self, server: Server) -> None:
        self.server, self.answered = server, 0
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._clients = [threading.Thread(target=self._ask, args=(place,)) for place in range(2)]

    def __enter__(self) -> Traffic:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for client in self._clients:
            client.join()
        assert self.failures == []

    def _ask(self, place: int) -> None:
        seed = place
        while not self._stopping.is_set():
            body = {**GREEDY[seed % 3], "temperature": 1, "seed": seed, "max_tokens": 24, "ignore_eos": True}
            reply = self.server.http.post("/v1/completions", json=body)
            with self._lock:
                if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 24:
                    self.answered += 1
                else:
                    self.failures.append(reply.text)
            seed += 2


def wait_for(holds: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given") / "draft"
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    save_draft(initialise_draft(DraftConfig(layers=2), target), folder, target)
    return folder


@pytest.mark.timeout(600)  # 220 s were seen beside much other work: processes import torch one after another
def test_it_learns_is_killed_and_goes_on_from_what_it_promoted(given: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "online")
    (tmp_path / "mine.py").write_text(REDACTION)
    words = ("online=on", f"draft.path={given}", "replay.redaction=mine:short_prompts_only")
    with serving(tmp_path, *words, *TRAIN) as server:
        quiet, first = server.greedy(), server.used()
        with Traffic(server) as traffic:
            pids = [server.new_trainer([])]
            for _ in range(2):
                os.kill(pids[-1], signal.SIGKILL)
                pids.append(server.new_trainer(pids))
            wait_for(lambda: server.used() != first)
            wait_for(lambda: server.metric("draft_promotions_total") >= 1)
            server.admin("POST", "online/pause")  # what serves now stays
            wait_for(lambda: server.admin("GET", "online")["trainer"]["stage"] == "paused")
            wait_for(lambda: all(d["status"] != "candidate" for d in server.admin("GET", "drafts")["drafts"]))
        assert traffic.answered >= 30
        assert server.greedy() == quiet
        promoted, status = server.used(), server.admin("GET", "online")
        assert promoted == status["serving"] != first
        assert server.metric("gate_verdicts_total", 'decision="promoted"') >= 1
        assert server.metric("trainer_starts_total") == 3
        assert server.metric("draft_info", promoted.partition("-")[2]) == 1
        assert server.metric("replay_dropped_answers_total", 'reason="redacted"') > 0
        assert server.end() == 0, server.errors.read_text()
    assert all(is_gone(pid) for pid in pids)
    logged = ReplayLog(layout.replay)
    files = {path.name for path in layout.replay.glob("*shard*")}
    assert len(files) == logged.sizes()["shards"]
    answers = logged.load(logged.entries())
    assert len(answers) == logged.sizes()["answers"] >= 30
    assert all(len(answer.prompt_ids) <= 5 for answer in answers)
    assert "Traceback" not in server.errors.read_text()

    # The promoted version serves after a restart without a draft; the server is killed while drafts are swapped.
    with serving(tmp_path, "online=decoupled") as server:
        assert (server.used(), server.greedy()) == (promoted, quiet)
        assert server.admin("GET", "online")["trainer"]["stage"] == "gone"
        swaps: list[str] = []

        def swap() -> None:
            with suppress(httpx.HTTPError):
                for name in (first, promoted) * 50:
                    server.admin("POST", "drafts/promote", {"draft": name})
                    swaps.append(name)

        swapping = threading.Thread(target=swap)
        swapping.start()
        wait_for(lambda: len(swaps) >= 3)
        server.process.kill()
        swapping.join()
    last = VersionRegistry(layout.versions).current()
    assert last is not None
    assert last.name in (first, promoted)
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    settings = OnlineSettings(OnlineConfig("on", str(layout.root)), ReplayConfig(entries=16))
    assert first_draft(settings, target) == last.path


@pytest.mark.timeout(300)
def test_a_second_signal_ends_server_and_trainer_at_once(given: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "online")
    with serving(tmp_path, "online=on", f"draft.path={given}", "server.drain_s=600", *TRAIN) as server:
        trainer, replies = server.new_trainer([]), []

        def ask() -> None:
            body = {**GREEDY[0], "max_tokens": 200, "ignore_eos": True, "n": 8}
            replies.append(server.http.post("/v1/completions", json=body))

        clients = [threading.Thread(target=ask) for _ in range(12)]
        for client in clients:
            client.start()
        wait_for(lambda: server.metric("num_requests_waiting") > 0)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.http.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 143, server.errors.read_text()
        for client in clients:
            client.join()
    cut = [reply for reply in replies if reply.status_code == 503]
    codes = {reply.json()["error"]["code"] for reply in cut}
    assert "shutting_down" in codes <= {"shutting_down", "draining"}  # the latter came too late to begin
    assert is_gone(trainer)
    assert "Traceback" not in server.errors.read_text()
    logged = ReplayLog(layout.replay)
    assert len(logged.load(logged.entries())) == logged.sizes()["answers"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["online=on"], "there is no draft in online/versions yet; give one to begin with: draft.path=FOLDER"),
        (["online=on", "draft.path=given", "engine.proposer=prompt_lookup"], "engine.proposer=prompt_lookup uses none"),
        (["online=on", "draft.path=given", "server.drafts_folder=."], "server.drafts_folder=. goes with online=off"),
        (["online=on", "draft.path=given", "loss=tvdpp"], "loss=tvdpp needs text that the draft wrote"),
        (["online=on", "draft.path=given", "online.folder=/proc/none"], "online.folder=/proc/none cannot be"),
        (["online=on", "draft.path=given", "online.folder=/dev/null/x"], "/dev/null is a file"),
        (
            ["online=on", "draft.path=given", "replay.redaction=nowhere:redact"],
            "nowhere:redact is not there",
        ),
        (
            ["online=on", "draft.path=given", "replay.redaction=redact"],
            "must be MODULE:FUNCTION",
        ),
        (["online=maybe"], "online=maybe is not known; use one of decoupled, off, on"),
        (["replay.share=0.5"], "replay.share=0.5 needs online adaptation: add online=on"),
        (["gate.requests=99"], "gate.requests=99 needs online adaptation"),
    ],
)
def test_what_cannot_be_joined_is_one_line(
    distill: Any, tmp_path: Path, given: Path, words: list[str], said: str
) -> None:
    words = [word.replace("draft.path=given", f"draft.path={given}") for word in words]
    outcome = distill("serve", "target=tiny", "target.dtype=float32", "server.port=0", *words)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert said in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_another_targets_folder_is_refused_and_left_as_it_is(distill: Any, tmp_path: Path, given: Path) -> None:
    """A folder whose log was recorded with other settings; the same check compares the target's weights."""
    layout = Layout(tmp_path / "online")
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    key = LogKey("0" * 64, target.identity.tokenizer_hash, target.identity.vocab_size, 64)
    ReplayLog(layout.replay, key).close()
    words = ("target.dtype=float32", "target.device=cpu", "server.port=0", "online=on", f"draft.path={given}")
    outcome = distill("serve", "target=tiny", *words)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert "was recorded with another weights_hash" in outcome.err
    assert not layout.versions.exists()
