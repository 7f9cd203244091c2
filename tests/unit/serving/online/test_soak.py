"""Ten thousand requests with random kills of server and trainer; run with -m soak."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from distillspec.serving.online.layout import Layout, TrainerState
from distillspec.serving.online.registry import VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "10000"))
LONGEST_LIFE_S = 120.0


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_nothing_acknowledged_is_lost_and_no_request_fails(tmp_path: Path) -> None:
    rng = random.Random(0)
    layout = Layout(tmp_path / "online")
    acknowledged = lives = 0
    while acknowledged < REQUESTS:
        lives += 1
        done = _one_life(tmp_path, acknowledged, rng, layout)
        assert done >= acknowledged
        acknowledged = done
        present = {entry.request_id for entry in ReplayLog(layout.replay).entries()}
        missing = [number for number in range(acknowledged) if f"r{number}" not in present]
        assert not missing, f"{len(missing)} acknowledged requests are gone, the first is r{missing[0]}"
        registry = VersionRegistry(layout.versions)
        booted = registry.boot()
        assert booted is not None
        assert registry.problem_of(booted) is None
        print(f"soak: life {lives}: {acknowledged} requests, {booted.name} serves", flush=True)
    replay = ReplayLog(layout.replay)
    assert len(replay.load(replay.entries())) >= REQUESTS
    updates, promotions = TrainerState.read(layout.state).updates, len(registry.promotions()) - 1
    print(
        f"soak: passed: {REQUESTS} requests, {lives} lives of the server, {updates} updates, {promotions} promotions; "
        "none failed, nothing acknowledged was lost"
    )


def _one_life(folder: Path, first: int, rng: random.Random, layout: Layout) -> int:
    """Serve from `first` on until killed or done; up to where requests were acknowledged."""
    script = Path(__file__).with_name("soak_server.py")
    words = [sys.executable, "-W", "ignore", str(script), str(folder), str(first), str(REQUESTS)]
    said = first
    with (folder / "errors.txt").open("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        killers = [
            threading.Timer(rng.uniform(1, LONGEST_LIFE_S), process.kill),
            threading.Timer(rng.uniform(1, LONGEST_LIFE_S), _kill_trainer, [layout]),
        ]
        for line in process.stdout:
            if line.startswith("serving"):  # its time begins here, however long a busy machine took to start it
                for killer in killers:
                    killer.start()
            elif line.startswith("acknowledged"):
                said = int(line.split()[1])
        process.wait()
        for killer in killers:
            killer.cancel()
        errors.seek(0)
        assert process.returncode in (0, -signal.SIGKILL), errors.read()
    process.stdout.close()
    return said


def _kill_trainer(layout: Layout) -> None:
    """The process that says it trains, if it still is what it says."""
    pid = TrainerState.read(layout.state).pid
    with suppress(OSError):
        if b"online.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
