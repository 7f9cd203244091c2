"""A trainer that hangs is told from one that works slowly, one that is stopped, and a server that did not look."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.heartbeat import MOST_AT_ONCE_S, PATIENCE_S, Heartbeat, beat
from distillspec.serving.online.training.process import run_trainer
from distillspec.serving.online.training.supervisor import Supervisor

from ..conftest import Answer
from .conftest import changed, fill

LOOK_S = MOST_AT_ONCE_S / 2


class Watch:
    """A heartbeat that is looked at by a clock of the test's own."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s, self.stopped_s, self._beats = path, 0.0, 0.0, 0
        self.heartbeat = Heartbeat(path, lambda: self.stopped_s, lambda: self.now_s)

    def beat(self, step: int = 1) -> None:
        """Beat at another time of the machine's clock."""
        self._beats += step
        beat(self.path)
        os.utime(self.path, ns=(0, 10**18 + self._beats))

    def is_lost_after(self, seconds: float, *, every_s: float = LOOK_S, stopped: float = 0.0) -> bool:
        """Look again and again. `stopped` is the part of the time in which the trainer stands still."""
        found = []
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.stopped_s += stopped * every_s
            found.append(self.heartbeat.is_lost())
        return found[-1]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path / "heartbeat")


def test_silence_is_borne_for_a_while_beyond_the_longest_so_far(watch: Watch) -> None:
    assert not watch.is_lost_after(PATIENCE_S)
    watch.beat()
    assert not watch.is_lost_after(LOOK_S)
    assert not watch.is_lost_after(2 * PATIENCE_S), "a step took as long"
    assert watch.is_lost_after(2 * LOOK_S)
    watch.heartbeat.begin()
    assert not watch.is_lost_after(PATIENCE_S), "the next trainer has as long"


@pytest.mark.parametrize("step", [1, -3600 * 10**9])
def test_a_beat_is_heard_wherever_the_machines_clock_is_set(watch: Watch, step: int) -> None:
    for _ in range(3):
        watch.beat(step)
        assert not watch.is_lost_after(PATIENCE_S)


def test_time_in_which_it_could_not_run_is_no_silence(watch: Watch) -> None:
    assert not watch.is_lost_after(20 * PATIENCE_S, stopped=1.0)
    assert not watch.is_lost_after(9 * PATIENCE_S, stopped=0.9)
    assert watch.is_lost_after(2 * PATIENCE_S, stopped=0.9)


def test_time_in_which_nobody_looked_is_hardly_any(watch: Watch) -> None:
    """The server stood still too, and perhaps the whole container."""
    assert not watch.is_lost_after(10 * PATIENCE_S, every_s=10 * PATIENCE_S)


def test_a_beat_changes_the_files_time(watch: Watch) -> None:
    beat(watch.path)
    os.utime(watch.path, ns=(0, 0))
    beat(watch.path)
    assert watch.path.stat().st_mtime_ns > 0
    assert watch.path.stat().st_mode & 0o777 == 0o600
    beat(watch.path.parent / "no" / "folder")  # a full disk ends no update


def test_the_trainer_beats_at_each_step_and_while_it_waits(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, answer: Answer
) -> None:
    fill(replay, answer, 6)
    path, beaten, seen = settings.layout.heartbeat, list[bool](), list[object]()

    def see(what: object) -> None:
        beaten.append(path.stat().st_mtime_ns > 0)
        seen.append(what)
        os.utime(path, ns=(0, 0))

    run_trainer(changed(settings, every_requests=4, epochs=3), lambda: seen.count(0.5) == 2, on_stage=see, wait=see)
    assert all(beaten)
    assert seen.count("learning") == 3
    assert seen[-2:] == [0.5, 0.5]


def test_a_trainer_that_hangs_is_ended_and_started_again(settings: OnlineSettings) -> None:
    now, path = [0.0], settings.layout.heartbeat
    hanging = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    supervisor = Supervisor(settings, command=hanging, clock=lambda: now[0])
    supervisor.poll()
    first = supervisor.process
    assert first is not None

    def poll_for(seconds: float, before: Callable[[], object] = lambda: None) -> None:
        for _ in range(round(seconds / LOOK_S)):
            now[0] += LOOK_S
            before()
            supervisor.poll()

    beat(path)
    poll_for(3 * PATIENCE_S, lambda: os.utime(path, ns=(0, int(now[0]))))
    assert supervisor.pid == first.pid
    poll_for(PATIENCE_S)
    assert supervisor.pid == first.pid
    poll_for(2 * LOOK_S)
    assert first.wait(20) == -signal.SIGKILL
    poll_for(4 * LOOK_S)
    assert supervisor.starts == 2
    assert supervisor.pid not in (None, first.pid)
    supervisor.stop()
