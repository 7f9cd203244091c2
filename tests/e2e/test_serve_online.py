"""`distill serve online=on` as a process under traffic: it learns, survives kills, and boots what it promoted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from distillspec.config import OnlineConfig, ReplayConfig, TargetConfig
from distillspec.models import load_target
from distillspec.serving.online.bootstrap import first_draft
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import Layout, OnlineSettings, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry

from .online_server import GREEDY, PATIENCE_S, TRAIN, Server, Traffic, is_gone, serving, state_of, wait_for

REDACTION = "def short_prompts_only(answer):\n    return answer if len(answer.prompt_ids) <= 5 else None\n"


def kill_while_it_learns(server: Server, pid: int, layout: Layout) -> None:
    """SIGKILL in the middle of an update: the trainer is held still while one looks, so that this is no guess."""

    def is_held_learning() -> bool:
        state = TrainerState.read(layout.state)
        if (state.pid, state.stage) != (pid, "learning"):
            return False
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: state_of(pid) == "T", every_s=0.001)
        if TrainerState.read(layout.state).stage == "learning":
            return True
        os.kill(pid, signal.SIGCONT)  # it was just done with it
        return False

    wait_for(is_held_learning, every_s=0.002)
    shown = server.trainer()
    assert (shown["pid"], shown["stage"]) == (pid, "learning")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid))


@pytest.mark.long
@pytest.mark.timeout(600)  # 220 s were seen beside much other work: processes import torch one after another
def test_it_learns_is_killed_and_goes_on_from_what_it_promoted(given: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "online")
    (tmp_path / "mine.py").write_text(REDACTION)
    words = ("online=on", f"draft.path={given}", "replay.redaction=mine:short_prompts_only")
    with serving(tmp_path, *words, *TRAIN) as server:
        quiet, first = server.greedy(), server.used()
        with Traffic(server) as traffic:
            pids = [server.new_trainer([])]
            os.kill(pids[0], signal.SIGKILL)  # as it starts
            pids.append(server.new_trainer(pids))
            before = traffic.answered
            kill_while_it_learns(server, pids[1], layout)
            assert TrainerState.read(layout.state).stage == "learning"
            assert TrainerState.read(layout.state).updates == 0
            killed_at = traffic.answered
            assert server.greedy() == quiet
            wait_for(lambda: traffic.answered >= killed_at + 10)
            assert server.drafts() == {first: "promoted"}
            in_service = VersionRegistry(layout.versions).current()
            assert in_service is not None
            assert in_service.name == first == server.used()
            assert VersionRegistry(layout.versions).problem_of(in_service) is None
            answers = list(traffic.answers.items())
            halves = answers[max(0, before - 4) : before + 10], answers[max(0, killed_at - 10) : killed_at + 10]
            around = dict(halves[0] + halves[1])
            pids.append(server.new_trainer(pids))
            wait_for(lambda: server.used() != first, patience_s=400)  # more than one update may be needed
            wait_for(lambda: server.metric("draft_promotions_total") >= 1)
            server.admin("POST", "online/pause")  # what serves now stays
            wait_for(lambda: server.trainer()["stage"] == "paused")
            wait_for(lambda: "candidate" not in server.drafts().values())
        assert traffic.answered >= 30
        assert server.greedy() == quiet
        # Seeded answers beside the dying trainer are those of quiet and of another draft.
        assert min(map(len, halves)) >= 10
        assert {seed: traffic.ask(seed).json()["choices"][0]["text"] for seed in around} == around
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
    kept = logged.load(logged.entries())
    assert len(kept) == logged.sizes()["answers"] >= 30
    assert all(len(answer.prompt_ids) <= 5 for answer in kept)
    assert "Traceback" not in server.errors.read_text()

    # The promoted version serves after a restart without a draft. The server is killed while drafts are swapped.
    with serving(tmp_path, "online=decoupled") as server:
        assert (server.used(), server.greedy()) == (promoted, quiet)
        assert server.trainer()["stage"] == "gone"
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


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Files are open to others unless a program says otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(*folders: Path) -> list[str]:
    found = [path for folder in folders for path in (folder, *folder.rglob("*"))]
    assert len(found) > len(folders)
    return [f"{path.stat().st_mode:o} {path}" for path in found if path.stat().st_mode & 0o077]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("usual_umask")
def test_a_second_signal_ends_server_and_trainer_at_once(distill: Any, given: Path, tmp_path: Path) -> None:
    """Until then and afterwards, what was asked is on disk for this account alone: the log, its database with
    write-ahead log, versions, trainer, run folder and exports."""
    layout, folders = Layout(tmp_path / "online"), [tmp_path / "online", tmp_path / "run"]
    with serving(tmp_path, "online=on", f"draft.path={given}", "server.drain_s=600", *TRAIN) as server:
        assert server.trainer()["stage"] == "waiting_for_text"
        with Traffic(server):
            trainer, replies = server.new_trainer([]), []
        server.greedy()
        wait_for(lambda: server.metric("replay_answers") >= len(GREEDY))
        assert {"manifest.sqlite-wal", "manifest.sqlite-shm"} <= {path.name for path in layout.root.rglob("*")}
        assert open_to_others(*folders) == []

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
    assert distill("replay", "action=export", f"online.folder={layout.root}", "hydra.run.dir=export").code == 0
    assert (tmp_path / "export" / "replay.safetensors").is_file()
    assert open_to_others(*folders, tmp_path / "export") == []
    assert os.umask(0o022) == 0o022  # a command leaves it as it was


@pytest.mark.timeout(300)
def test_a_damaged_only_version_keeps_no_server_from_starting(given: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "online")
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    only = first_draft(OnlineSettings(OnlineConfig("on", str(layout.root)), ReplayConfig(entries=16)), target, given)
    (only / "model.safetensors").write_bytes(b"damaged")
    with serving(tmp_path, "online=on", *TRAIN) as server:
        assert len(server.greedy()) == len(GREEDY)
        assert server.metric("online_enabled") == 0
        assert "serving without a draft" in server.errors.read_text()
        assert server.end() == 0, server.errors.read_text()


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
            "nowhere:redact cannot be imported",
        ),
        (["online=on", "draft.path=given", "replay.redaction=math:pi"], "replay.redaction=math:pi is no function"),
        (
            ["online=on", "draft.path=given", "replay.redaction=redact"],
            "must be MODULE:FUNCTION",
        ),
        (
            ["online=on", "draft.path=given", "adapt.offline=nowhere", "adapt.offline_share=0.2"],
            "adapt.offline=nowhere is not a data folder; make one with distill generate",
        ),
        (["online=maybe"], "online=maybe is not known; use one of decoupled, off, on"),
        (["replay.share=0.5"], "replay.share=0.5 needs online=on or online=decoupled"),
        (["gate.requests=99"], "gate.requests=99 needs online=on or online=decoupled"),
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
    """The log was recorded with other weights."""
    layout = Layout(tmp_path / "online")
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    key = LogKey("0" * 64, target.identity.tokenizer_hash, target.identity.vocab_size, 64)
    ReplayLog(layout.replay, key).close()
    words = ("target.dtype=float32", "target.device=cpu", "server.port=0", "online=on", f"draft.path={given}")
    outcome = distill("serve", "target=tiny", *words)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert "was recorded with another weights_hash" in outcome.err
    assert not layout.versions.exists()
