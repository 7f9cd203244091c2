"""`distill serve online=decoupled` with `distill adapt`: the server judges and serves the trainer's versions."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distillspec.serving.online.state.layout import Layout, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry

from .online_server import LEARN, PATIENCE_S, Server, Traffic, serving, wait_for

ADAPT = ("adapt", "target=tiny", "online.folder=online", *LEARN)


@contextmanager
def adapting(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run `distill adapt` inside the block."""
    with (folder / "adapt.log").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "distillspec.cli", *ADAPT, *words],
            cwd=folder,
            text=True,
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def judged(server: Server, known: Collection[str]) -> list[str]:
    """Return the versions that the gate has judged, except those known."""
    return [name for name, status in server.drafts().items() if name not in known and status != "candidate"]


def waits_for_a_trainer(server: Server) -> bool:
    """Return True for a candidate that no trainer has read answers under: one that ended as soon as it had made it."""
    return bool(server.admin("GET", "online")["waiting_for"] == "0 of 8 conversations")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_server_serves_versions_of_trainers_that_come_and_go(distill: Any, given: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "online")
    with serving(tmp_path, "online=decoupled", f"draft.path={given}") as server:
        quiet, first = server.greedy(), server.used()
        assert (server.trainer()["pid"], server.trainer()["stage"]) == (0, "gone")
        with Traffic(server) as traffic:
            # A trainer that ends after one update. Its candidate waits for one that reads answers under it.
            once = distill(*ADAPT, "max_updates=1", "hydra.run.dir=once")
            assert once.code == 0, once.err
            (made,) = re.findall(r"^candidate: (\S+)$", once.out, re.MULTILINE)
            assert json.loads((tmp_path / "once" / "summary.json").read_text())["versions"] == [made]
            assert TrainerState.read(layout.state).updates == 1
            wait_for(lambda: server.admin("GET", "online")["waiting_for"] == "0 of 8 conversations")
            assert server.drafts() == {first: "promoted", made: "candidate"}
            assert server.trainer()["stage"] == "gone"

            with adapting(tmp_path, "hydra.run.dir=on") as trainer:
                wait_for(lambda: server.trainer()["pid"] == trainer.pid)
                wait_for(lambda: server.drafts()[made] != "candidate", patience_s=300)
                verdict = next(v for v in server.admin("GET", "online/verdicts")["verdicts"] if v["version"] == made)
                assert verdict["decision"] in ("promoted", "inconclusive", "refused")
                assert verdict["requests"] >= 8
                wait_for(lambda: server.used() != first and judged(server, (first, made)), patience_s=300)
                assert server.trainer()["stage"] != "gone"
                trainer.send_signal(signal.SIGTERM)
                assert trainer.wait(PATIENCE_S) == 0, (tmp_path / "adapt.log").read_text()
            wait_for(lambda: waits_for_a_trainer(server) == ("candidate" in server.drafts().values()))
            assert server.trainer()["stage"] == "gone"
            answered = traffic.answered
            wait_for(lambda: traffic.answered >= answered + 10)
        assert server.greedy() == quiet
        promoted = server.used()
        assert server.metric("draft_promotions_total") >= 1
        assert server.metric("trainer_starts_total") == 0  # not by the server
        assert server.end() == 0, server.errors.read_text()
    versions = json.loads((tmp_path / "on" / "summary.json").read_text())["versions"]
    assert versions
    assert promoted in (made, *versions)
    serving_now = VersionRegistry(layout.versions).current()
    assert serving_now is not None
    assert serving_now.name == promoted
    output = (tmp_path / "adapt.log").read_text()
    assert all(f"candidate: {name}" in output for name in versions)
    assert "Traceback" not in output + server.errors.read_text()
