"""/admin: drafts by name and never by path, the length controller, features that are off."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving.proposers.suffix_store import SuffixStore
from distillspec.serving.server.bridge.catalogue import FolderCatalogue
from distillspec.serving.server.http.keys import KeyRing
from distillspec.serving.server.routes import admin as admin_routes

from ..conftest import ADMIN_KEY, Running, Serve, hold

HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}
ADMIN = KeyRing([("admin", ADMIN_KEY)])


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two drafts, `one` and `two`, beside a secret draft."""
    root = tmp_path_factory.mktemp("drafts")
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    for layers, name in ((1, "one"), (2, "two")):
        save_draft(initialise_draft(DraftConfig(layers=layers), target), root / "drafts" / name, target)
    shutil.copytree(root / "drafts" / "one", root / "secret")
    (root / "drafts" / "link").symlink_to(root / "secret")
    (root / "drafts" / "empty").mkdir()
    return root / "drafts"


@pytest.fixture
def admin(serve: Serve, drafts: Path) -> Running:
    engine = {"drafts": True}
    return serve(engine=engine, admin=ADMIN, catalogue=lambda own: FolderCatalogue(own, drafts, None))


def call(running: Running, method: str, path: str, body: Any = None) -> Any:
    reply = running.http.request(method, f"/admin/{path}", json=body, headers=HEADERS)
    return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"])


def test_drafts_are_listed_loaded_and_rolled_back(admin: Running) -> None:
    assert [entry["name"] for entry in call(admin, "GET", "drafts")["drafts"]] == ["one", "two"]
    quiet = admin.complete(max_tokens=20).json()
    first = call(admin, "POST", "drafts/load", {"draft": "one"})["version"]
    second = call(admin, "POST", "drafts/load", {"draft": "two"})["version"]
    assert first != second
    swapped = admin.complete(max_tokens=20).json()
    assert swapped["choices"] == quiet["choices"]
    assert swapped["speculation"]["draft_versions"] == [second]
    assert call(admin, "POST", "drafts/rollback")["version"] == first
    assert admin.complete(max_tokens=20).json()["speculation"]["draft_versions"] == [first]
    current = {entry["name"]: entry["current"] for entry in call(admin, "GET", "drafts")["drafts"]}
    assert current == {"one": True, "two": False}
    assert b'draft_info{draft_version="%s",model_name="tiny"} 1.0' % first.encode() in admin.state.metrics.text()
    assert admin.complete(speculation={"draft": first}).status_code == 200


def test_the_answer_to_a_load_says_whether_the_draft_is_in_use(admin: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = admin.state.engine
    for _ in range(5):  # an idle engine looks for work a few times a second
        loaded = call(admin, "POST", "drafts/load", {"draft": "one"})
        assert loaded == {"version": engine.draft_version, "switched": True}
    monkeypatch.setattr(admin_routes, "SWITCH_S", 0.1)
    release = hold(admin)
    late = call(admin, "POST", "drafts/load", {"draft": "two"})
    assert (late["switched"], engine.draft_version) == (False, loaded["version"])
    assert "before its next one" in late["note"]
    release.set()
    admin.wait_until_idle()
    assert engine.draft_version == late["version"]


def test_a_draft_that_is_loaded_again_is_no_further_step_back(admin: Running) -> None:
    first = call(admin, "POST", "drafts/load", {"draft": "one"})["version"]
    for _ in range(2):
        call(admin, "POST", "drafts/load", {"draft": "two"})
    assert call(admin, "POST", "drafts/rollback")["version"] == first
    assert call(admin, "POST", "drafts/rollback")[0] == 404


@pytest.mark.parametrize(
    "name", ["../secret", "..", ".", "link", "empty", "/etc", "one/../two", "one\0", "ONE ", "a" * 201, "~", "%2e%2e"]
)
def test_a_path_is_no_name(admin: Running, name: str) -> None:
    status, error = call(admin, "POST", "drafts/load", {"draft": name})
    assert status in (400, 404), error
    assert call(admin, "POST", "drafts/rollback")[0] == 404


def test_a_broken_draft_is_refused_and_the_old_one_stays(admin: Running, drafts: Path, tmp_path: Path) -> None:
    broken = drafts / "broken"
    shutil.copytree(drafts / "one", broken)
    next(broken.glob("*.safetensors")).write_bytes(b"nothing")
    before = admin.state.engine.draft
    try:
        status, error = call(admin, "POST", "drafts/load", {"draft": "broken"})
    finally:
        shutil.rmtree(broken)
    assert (status, error["code"]) == (400, "draft_refused")
    assert admin.state.engine.draft is before
    assert admin.complete().status_code == 200


def test_the_controller_is_bounded_fixed_and_switched_off(serve: Serve) -> None:
    running = serve(engine={"drafts": True, "controller": "goodput"}, admin=ADMIN)
    quiet = running.complete(max_tokens=30).json()["choices"]
    explained = call(running, "GET", "controller")
    assert (explained["policy"], explained["engine_controller"], explained["engine_speculation_length"]) == (
        "engine",
        "goodput",
        4,
    )
    assert {"mode", "lengths", "hazards", "raw", "usual"} <= set(explained["last_plan"])
    assert "at_once" in explained["last_plan"]["latency"]
    assert "rows" not in explained["last_plan"], "ids of requests are nobody's business"
    assert call(running, "PATCH", "controller", {"policy": "fixed", "speculation_length": 2})["speculation_length"] == 2
    fixed = running.complete(max_tokens=30).json()
    assert len(fixed["speculation"]["tried_per_position"]) == 2
    assert call(running, "PATCH", "controller", {"policy": "off"})["speculation_length"] == 2
    off = running.complete(max_tokens=30).json()
    assert off["speculation"]["proposed"] == 0
    assert quiet == fixed["choices"] == off["choices"]
    assert call(running, "PATCH", "controller", {"policy": "engine", "speculation_length": None})["policy"] == "engine"
    assert call(running, "PATCH", "controller", {"speculation_length": 9})[0] == 400
    assert call(running, "PATCH", "controller", {"policy": None})[0] == 400


def test_a_request_may_bound_its_time_per_token_where_lengths_are_chosen_by_goodput(serve: Serve) -> None:
    hurried = {"max_time_per_token_s": 1e-6}
    running = serve(engine={"drafts": True, "controller": "goodput"}, admin=ADMIN)
    quiet = running.complete(max_tokens=30).json()["choices"]
    assert call(running, "GET", "controller")["last_plan"]["slo_violation"] is None
    assert running.complete(max_tokens=30, speculation=hurried).json()["choices"] == quiet
    assert call(running, "GET", "controller")["last_plan"]["slo_violation"] > 1
    fixed = serve(engine={"drafts": True})
    refused = fixed.complete(max_tokens=30, speculation=hurried)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation.max_time_per_token_s"


@pytest.mark.parametrize(
    ("method", "path", "body", "setting"),
    [
        ("GET", "drafts", None, "server.drafts_folder"),
        ("POST", "drafts/load", {"draft": "x"}, "server.drafts_folder"),
        ("GET", "online", None, "online"),
        ("POST", "online/pause", None, "online"),
        ("POST", "online/resume", None, "online"),
        ("POST", "online/trigger", None, "online"),
        ("GET", "online/verdicts", None, "online"),
        ("GET", "replay", None, "online"),
        ("POST", "replay/delete", {"tenant": "x"}, "online"),
        ("POST", "replay/exclude", {"tenant": "x"}, "online"),
    ],
)
def test_what_is_off_names_its_setting(guarded: Running, method: str, path: str, body: Any, setting: str) -> None:
    status, error = call(guarded, method, path, body)
    assert (status, error["code"]) == (501, "not_enabled")
    assert f"{setting}=" in error["message"]


def test_hard_use_changes_no_answer(admin: Running) -> None:
    """Three in ten clients leave, one in ten sends garbage, drafts swap: greedy answers are those of a quiet run."""
    quiet = admin.complete(max_tokens=20).json()["choices"][0]["text"]
    texts: list[str] = []
    statuses: set[int] = set()

    async def client(http: httpx.AsyncClient, dice: random.Random) -> None:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 20, "temperature": 0, "stream": True}
        for _ in range(6):
            lot = dice.random()
            if lot < 0.1:
                raw = json.dumps(body).encode()[: dice.randrange(90)]
                reply = await http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
                statuses.add(reply.status_code)
                continue
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                if lot < 0.4:
                    await anext(reply.aiter_lines())
                    continue
                events = [line async for line in reply.aiter_lines() if line.startswith("data: {")]
            texts.append("".join(json.loads(event[6:])["choices"][0]["text"] for event in events))

    async def swap(http: httpx.AsyncClient) -> None:
        for name in ("two", "one", "two"):
            reply = await http.post("/admin/drafts/load", json={"draft": name}, headers=HEADERS)
            assert reply.status_code == 200

    async def everybody() -> None:
        async with httpx.AsyncClient(base_url=admin.url, timeout=120, trust_env=False) as http:
            await asyncio.gather(swap(http), *(client(http, random.Random(i)) for i in range(8)))

    asyncio.run(everybody())
    assert len(texts) > 20
    assert (set(texts), statuses) == ({quiet}, {400})
    admin.wait_until_idle()
    assert admin.state.engine.sequences.unfinished == {}
    admin.state.engine.check_integrity()


def test_draining_by_hand(guarded: Running) -> None:
    assert call(guarded, "POST", "drain") == {"draining": True, "open_answers": 0}
    assert guarded.http.get("/health").status_code == 503
    assert json.loads(guarded.http.get("/health").text)["error"]["code"] == "draining"


def test_a_deletion_answers_once_answers_are_gone_and_fails_where_they_stay(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve(engine={"proposer": "suffix"}, admin=ADMIN)
    running.complete(max_tokens=20)
    found = call(running, "POST", "replay/delete", {"tenant": "default"})
    assert found == {"tenant": "default", "deleted": 0}

    def refused(store: SuffixStore, tenant: str) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(SuffixStore, "forget", refused)
    status, error = call(running, "POST", "replay/delete", {"tenant": "default"})
    assert (status, error["code"]) == (500, "deletion_failed")
    assert "read-only file system" in error["message"]
    assert running.complete(max_tokens=4).status_code == 200
