"""A real server whose draft learns: tiny models, requests through sockets, the trainer a process or the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from distillspec.config import (
    AdaptConfig,
    DraftConfig,
    EngineConfig,
    GateConfig,
    OnlineConfig,
    ReplayConfig,
    TargetConfig,
)
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine
from distillspec.serving.commands.online_serving import AdaptationControl, RegistryCatalogue
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.bootstrap import first_draft
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.server.http.keys import KeyRing

from ..server.conftest import ADMIN_KEY, Running, start

KEYS = {name: f"secret-key-of-{name}" for name in ("alice", "bob")}


@dataclass
class Learning(Running):
    """A running server and its adaptation."""

    adaptation: Adaptation

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        reply = self.http.request(method, f"/admin/{path}", json=body, headers=headers)
        return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"])

    def ask(self, count: int, who: str = "alice", **fields: Any) -> None:
        """Request sampled answers of 16 tokens, four at a time. All must succeed."""

        def one(seed: int) -> httpx.Response:
            body = {
                "model": "tiny",
                "prompt": f"{seed:03d} abc",
                "max_tokens": 16,
                "seed": seed,
                "ignore_eos": True,
                **fields,
            }
            return self.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[who]}"})

        with ThreadPoolExecutor(4) as clients:
            assert [reply.status_code for reply in clients.map(one, range(count))] == [200] * count


StartLearning = Callable[..., Learning]


def online_settings(folder: Path, mode: str, **adapt: Any) -> OnlineSettings:
    defaults = {"every_requests": 20, "min_requests": 4, "learning_rate": 3e-3, "max_steps": 40, "epochs": 12}
    defaults |= {"row_tokens": 128, "batch_tokens": 256}
    return OnlineSettings(
        OnlineConfig(mode=mode, folder=str(folder / "online"), metrics_s=0.5),
        ReplayConfig(share=1.0, entries=16, shard_positions=200, flush_s=0.2),
        AdaptConfig(**{**defaults, "on_drift": False, "niceness": 0, "busy_share": 1.0, **adapt}),
        GateConfig(requests=48, min_requests=4, domain_requests=4, rollback_requests=8, bootstrap_samples=200),
        target=TargetConfig(path="tiny", dtype="float32", device="cpu"),
    )


@pytest.fixture
def learn(tmp_path: Path) -> Iterator[StartLearning]:
    """`learn("decoupled")` starts a server with its adaptation. Both are stopped as `distill serve` stops them."""
    made: list[Learning] = []
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    given = tmp_path / "given"
    save_draft(initialise_draft(DraftConfig(layers=2), target), given, target)

    def start_one(
        mode: str, replay: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **adapt: Any
    ) -> Learning:
        settings = online_settings(tmp_path, mode, **adapt)
        settings = replace(settings, replay=replace(settings.replay, **(replay or {})))
        draft = load_pretrained(str(first_draft(settings, target, given)), target, target.dtype)
        limits = EngineConfig(max_slots=4, max_model_len=256, compile=False, controller="fixed", speculation_length=2)
        serving = Engine(target, draft, replace(limits, **(engine or {})))
        adaptation = Adaptation(serving, settings, wake=lambda: running.state.bridge.thread.wake())
        options = {
            "online": AdaptationControl(adaptation),
            "catalogue": RegistryCatalogue(adaptation),
            "keys": KeyRing((name, key) for name, key in KEYS.items()),
            "admin": KeyRing([("admin", ADMIN_KEY)]),
        }
        adaptation.start()
        plain = start(serving, options, {})
        running = Learning(plain.url, plain.state, plain.server, plain.thread, adaptation)
        made.append(running)
        return running

    yield start_one
    for running in made:
        running.stop()
        running.adaptation.stop()
        running.state.engine.close()
