"""`distill serve` with online adaptation as a process of its own, the hand on its admin, and endless traffic."""

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

PATIENCE_S = 120.0
ADMIN_KEY = "the-admin-key"
SERVE = (
    *("target=tiny", "target.dtype=float32", "target.device=cpu", "server.port=0", "hydra.run.dir=run"),
    *("engine.compile=false", "engine.max_model_len=256", "engine.max_slots=4"),
    *("engine.controller=fixed", "engine.speculation_length=2"),
    *("online.metrics_s=0.5", "replay.share=1", "replay.entries=16", "replay.flush_s=0.2"),
    *("gate.requests=48", "gate.min_requests=8", "gate.bootstrap_samples=200"),
)
LEARN = (  # of a trainer, whoever starts it
    *("adapt.every_requests=20", "adapt.on_drift=false", "adapt.learning_rate=3e-3"),
    *("adapt.max_steps=40", "adapt.epochs=12", "adapt.row_tokens=128", "adapt.batch_tokens=256"),
)
TRAIN = (*LEARN, "adapt.niceness=0", "adapt.busy_share=1")  # of one that the server starts
GREEDY = [{"model": "tiny", "prompt": text, "max_tokens": 40, "temperature": 0} for text in ("abc", "Hello", "12 + 3")]


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

    def drafts(self) -> dict[str, str]:
        """Every version's status."""
        return {draft["name"]: draft["status"] for draft in self.admin("GET", "drafts")["drafts"]}

    def used(self) -> str:
        return next(draft["name"] for draft in self.admin("GET", "drafts")["drafts"] if draft["current"])

    def trainer(self) -> dict[str, Any]:
        return self.admin("GET", "online")["trainer"]

    def new_trainer(self, known: Sequence[int]) -> int:
        """The process number of a trainer that is none of those known."""
        until = time.monotonic() + PATIENCE_S
        while (pid := self.trainer()["pid"] or 0) in (0, *known):
            assert time.monotonic() < until
            time.sleep(0.05)
        return int(pid)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def serving(folder: Path, *words: str, settings: Sequence[str] = SERVE) -> Iterator[Server]:
    errors = folder / "errors.log"
    with errors.open("a") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "distillspec.cli", "serve", *settings, *words],
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
    """Two clients that never pause. Every request must be answered in full."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answers: dict[int, str] = {}  # by seed, in the order in which they came
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._clients = [threading.Thread(target=self._go_on, args=(place,)) for place in range(2)]

    @property
    def answered(self) -> int:
        return len(self.answers)

    def ask(self, seed: int) -> httpx.Response:
        """Send request number `seed`: a conversation of its own, whose answer is always the same."""
        prompt = f"{seed:04d}" if seed % 3 else f"{seed:04d} long"
        body = {**GREEDY[0], "prompt": prompt, "temperature": 1, "seed": seed, "max_tokens": 24, "ignore_eos": True}
        return self.server.http.post("/v1/completions", json=body)

    def __enter__(self) -> Traffic:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for client in self._clients:
            client.join()
        assert self.failures == []

    def _go_on(self, seed: int) -> None:
        while not self._stopping.is_set():
            reply = self.ask(seed)
            with self._lock:
                if reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 24:
                    self.answers[seed] = reply.json()["choices"][0]["text"]
                else:
                    self.failures.append(reply.text)
            seed += 2


def wait_for(holds: Callable[[], Any], every_s: float = 0.05, patience_s: float = PATIENCE_S) -> None:
    until = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(every_s)


def state_of(pid: int) -> str:
    """Return the kernel's state letter of a process. Z (zombie) also if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def is_gone(pid: int) -> bool:
    return state_of(pid) == "Z"
