"""Requests through the tiny models while server and trainer are killed: some always, ten thousand with -m soak."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import Layout, TrainerState
from distillspec.serving.online.state.registry import VersionRegistry

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "10000"))
LONGEST_LIFE_S = 120.0
MOST_LIVES = 100


class Soak:
    """One server after another over the same folder, and after each what must hold however it ended."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.layout = Layout(folder / "online")
        self.acknowledged = 0
        self.lives: list[str] = []  # what each began with
        self.killed: Counter[str] = Counter()

    @property
    def updates(self) -> int:
        return TrainerState.read(self.layout.state).updates

    @property
    def promoted(self) -> list[str]:
        """Versions that the gate promoted."""
        versions = VersionRegistry(self.layout.versions).versions()
        return [version.name for version in versions if version.verdict.get("decision") == "promoted"]

    @property
    def missing(self) -> list[str]:
        """Events that a soak needs and that have not happened yet."""
        counts = {
            "a killed server": self.killed["server"],
            "a killed trainer": self.killed["trainer"],
            "an update": self.updates,
            "a promotion": len(self.promoted),
        }
        return [name for name, count in counts.items() if not count]

    def live(self, is_over: Callable[[float], bool], end: signal.Signals = signal.SIGKILL) -> None:
        """Serve until `is_over(seconds of service)`, called after every lot, then end the server a moment later."""
        script = Path(__file__).with_name("soak_server.py")
        words = [sys.executable, "-W", "ignore", str(script), str(self.folder), str(self.acknowledged)]
        with (self.folder / "errors.txt").open("w+") as errors:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
            ender = threading.Timer(self.rng.uniform(0, 0.5), process.send_signal, [end])
            try:
                self._follow(process, is_over, ender)
                code = process.wait()
            finally:
                ender.cancel()
                process.kill()
                process.communicate()
            errors.seek(0)
            assert code == (-signal.SIGKILL if end == signal.SIGKILL else 0), errors.read()
        self.killed["server"] += end == signal.SIGKILL
        self._check()

    def kill_trainer(self) -> bool:
        """Kill the trainer process. Return False if its recorded process id is no trainer any more."""
        pid = TrainerState.read(self.layout.state).pid
        with suppress(OSError):
            if b"distillspec.serving.online.training" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                self.killed["trainer"] += 1
                return True
        return False

    def _follow(self, process: subprocess.Popen[str], is_over: Callable[[float], bool], ender: threading.Timer) -> None:
        assert process.stdout is not None
        began, ending = 0.0, False
        for line in process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "serving":  # its time begins here, however long a busy machine took to start it
                began = time.monotonic()
                self.lives.append(rest)
            elif word == "acknowledged":
                self.acknowledged = int(rest)
                if not ending and is_over(time.monotonic() - began):
                    ending = True
                    ender.start()

    def _check(self) -> None:
        """Nothing acknowledged is lost, and the next start finds a sound draft."""
        replay, registry = ReplayLog(self.layout.replay), VersionRegistry(self.layout.versions)
        entries = replay.entries()
        present = {entry.request_id for entry in entries}
        missing = [number for number in range(self.acknowledged) if f"r{number}" not in present]
        assert not missing, f"{len(missing)} acknowledged requests are gone, the first is r{missing[0]}"
        assert len(replay.load(entries)) >= self.acknowledged
        booted = registry.boot()
        assert booted is not None
        assert registry.problem_of(booted) is None
        print(f"soak: life {len(self.lives)}: {self.acknowledged} requests, {booted.name} serves", flush=True)


@pytest.mark.long
def test_nothing_is_lost_when_trainer_and_server_are_killed_once(tmp_path: Path) -> None:
    soak = Soak(tmp_path, random.Random(0))
    soak.live(lambda age_s: bool(soak.promoted) and soak.kill_trainer())
    assert soak.missing == []
    first, killed_at = soak.lives[0], soak.acknowledged
    assert first not in soak.promoted
    soak.live(lambda age_s: soak.acknowledged >= killed_at + 200, end=signal.SIGTERM)
    assert soak.lives[1] in soak.promoted  # the second life began with what the first one learnt
    assert soak.killed == {"server": 1, "trainer": 1}
    assert soak.acknowledged >= 400


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_nothing_acknowledged_is_lost_and_no_request_fails(tmp_path: Path) -> None:
    soak = Soak(tmp_path, random.Random(0))
    while soak.acknowledged < REQUESTS or (soak.missing and len(soak.lives) < MOST_LIVES):
        soak.live(random_end(soak))
    soak.live(lambda age_s: True, end=signal.SIGTERM)  # the last one lives
    assert soak.missing == []
    assert len(set(soak.lives)) > 1  # drafts were swapped, and taken up again
    print(
        f"soak: passed: {soak.acknowledged} requests, {len(soak.lives)} lives of the server, "
        f"{soak.killed['server']} of them and {soak.killed['trainer']} trainers killed, {soak.updates} updates, "
        f"{len(soak.promoted)} promotions; none failed, nothing acknowledged was lost"
    )


def random_end(soak: Soak) -> Callable[[float], bool]:
    """A life of random length, in which the trainer is killed at a random time (which may come too late)."""
    server_s, trainer_s = (soak.rng.uniform(1, LONGEST_LIFE_S) for _ in range(2))
    spared = True

    def is_over(age_s: float) -> bool:
        nonlocal spared
        if spared and age_s > trainer_s:
            spared = not soak.kill_trainer()
        done = soak.acknowledged >= REQUESTS and not soak.missing
        return age_s > server_s or done

    return is_over
