"""The trainer's brake, on a process that counts how far it comes."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest

from distillspec.serving.online.training import brake as module
from distillspec.serving.online.training.brake import URGENT_SHARE, Brake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux alone")
PATIENCE_S = 20.0


@contextmanager
def process() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as started:
        try:
            yield psutil.Process(started.pid)
        finally:
            started.kill()


def reaches(process: psutil.Process, wanted: set[str]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while process.status() not in wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def wait_for(count: int, sent: Sized) -> None:
    """Wait until so many signals were sent, but not for ever."""
    deadline = time.monotonic() + PATIENCE_S
    while len(sent) < count and time.monotonic() < deadline:
        time.sleep(0.005)


class Here:
    """A thread that runs in the one that starts it."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target

    def join(self) -> None:
        """Return at once: it ran to its end."""


class Simulated(threading.Condition):
    """Time, condition and thread of a brake, without any real wait: how busy this machine is makes no difference.

    What the brake waits for comes at once, and before it, at their times, the `events`. The last one releases the
    brake. `Brake.start` returns after it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now_s = 0.0
        self.events: deque[tuple[float, Callable[[], None]]] = deque()
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        patch.setattr(module, "threading", SimpleNamespace(Condition=lambda: self, Thread=Here))

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_s = math.inf if timeout is None else self.now_s + timeout
        while not predicate():
            if not self.events or self.events[0][0] > end_s:
                assert timeout is not None, "nobody releases the brake"
                self.now_s = end_s
                return False
            self.now_s, happens = self.events.popleft()
            happens()
        return True


STOPPED, GOING = {psutil.STATUS_STOPPED}, {psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING}


@pytest.fixture
def braked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[psutil.Process, Brake]]:
    """A trainer that a brake stops once, for long.

    On a busy machine the next request may come before the brake's thread has seen that none was there. The trainer then
    first runs for its share of the period: two seconds, far less than a test waits.
    """
    monkeypatch.setattr(module, "PERIOD_S", 200.0)
    with process() as trainer:
        brake = Brake(lambda: trainer.pid, 0.01)
        brake.start()
        try:
            yield trainer, brake
        finally:
            brake.release()


def test_it_stands_still_beside_requests_and_goes_on_after_them(braked: tuple[psutil.Process, Brake]) -> None:
    trainer, brake = braked
    assert reaches(trainer, GOING)
    brake.set_busy(True)
    assert reaches(trainer, STOPPED)
    brake.set_busy(False)
    assert reaches(trainer, GOING)
    brake.set_busy(True)
    assert reaches(trainer, STOPPED)
    brake.release()
    assert reaches(trainer, GOING), "a stopped trainer could not be ended in order"


@pytest.mark.parametrize(("own", "share"), [(0.01, URGENT_SHARE), (0.6, 0.6)])
def test_its_share_beside_requests_is_larger_while_its_work_is_urgent(
    monkeypatch: pytest.MonkeyPatch, own: float, share: float
) -> None:
    """Also while it is ahead. It never has all of the time: beside it a token takes several times as long."""
    simulated, sent = Simulated(monkeypatch), list[tuple[signal.Signals, float]]()
    brake = Brake(lambda: 1, own, lambda pid, which: sent.append((which, simulated.now_s)))
    simulated.events += [
        (100.0, partial(brake.set_busy, True)),  # it is a minute ahead by now
        (102.0, partial(brake.set_urgent, True)),
        (112.0, partial(brake.set_urgent, False)),
        (120.0, brake.release),
    ]
    brake.start()
    assert stopped_between(sent, 102.0, 112.0) == pytest.approx(10.0 * (1 - share), abs=0.5)
    assert stopped_between(sent, 112.0, 120.0) > 8.0 * (1 - own) - 0.5


def stopped_between(sent: list[tuple[signal.Signals, float]], start_s: float, end_s: float) -> float:
    """Return the seconds of a time in which it stood still, by the signals that were sent."""
    stops = [at for which, at in sent if which == signal.SIGSTOP]
    goes = [at for which, at in sent if which == signal.SIGCONT]
    pairs = zip(stops, goes, strict=True)
    return sum(max(0.0, min(go, end_s) - max(stop, start_s)) for stop, go in pairs)


def test_beside_requests_it_runs_its_share_of_the_time() -> None:
    """By the signals' own times: the machine that tests run on is not idle."""
    sent: list[tuple[signal.Signals, float]] = []
    brake = Brake(lambda: 1, 0.25, lambda pid, which: sent.append((which, time.monotonic())))
    brake.set_busy(True)
    brake.start()
    wait_for(9, sent)
    brake.release()
    assert [which for which, _ in sent[:4]] == [signal.SIGSTOP, signal.SIGCONT] * 2
    assert sent[-1][0] == signal.SIGCONT
    times = [at for _, at in sent[:9]]
    stopped = [later - at for at, later in zip(times[0::2], times[1::2], strict=False)]
    assert min(stopped) >= 0.75 * module.PERIOD_S - 0.01
    running = [later - at for at, later in zip(times[1::2], times[2::2], strict=False)]
    assert min(running) >= 0.25 * module.PERIOD_S - 0.01


def test_it_counts_how_long_the_trainer_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    sent: list[tuple[signal.Signals, float]] = []
    brake = Brake(lambda: 1, 0.25, lambda pid, which: sent.append((which, time.monotonic())))
    assert brake.stopped_s == 0.0
    brake.set_busy(True)
    brake.start()
    wait_for(9, sent)
    brake.release()
    stops = [later - at for (which, at), (_, later) in pairwise(sent) if which == signal.SIGSTOP]
    assert (len(stops) - 1) * 0.75 * module.PERIOD_S <= brake.stopped_s <= sum(stops)  # the last one was cut short


def test_a_stop_counts_while_it_lasts(braked: tuple[psutil.Process, Brake]) -> None:
    trainer, brake = braked
    brake.set_busy(True)
    assert reaches(trainer, STOPPED)
    deadline = time.monotonic() + PATIENCE_S
    while not brake.stopped_s and time.monotonic() < deadline:
        time.sleep(0.005)
    assert brake.stopped_s > 0.0


def test_time_between_requests_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran for .3 s while none was there. So it stands still for thirty stops, and then gets its share again."""
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    monkeypatch.setattr(module, "STILL_S", 0.019)
    monkeypatch.setattr(module, "RELEASE_S", 0.001)
    simulated, sent = Simulated(monkeypatch), list[tuple[signal.Signals, float]]()
    brake = Brake(lambda: 1, 0.5, lambda pid, which: sent.append((which, simulated.now_s)))
    simulated.events += [(0.3, partial(brake.set_busy, True)), (1.5, brake.release)]
    brake.start()
    times = [at for _, at in sent[:100]]
    running = [later - at for at, later in zip(times[1::2], times[2::2], strict=False)]
    assert running[:29] == pytest.approx([0.001] * 29)
    assert running[30:] == pytest.approx([0.01] * 19)  # the one between them is either, by how floats are rounded


def test_a_short_request_costs_as_much_as_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty requests of a tenth of a long stop each. All of them would be paid for by a second without any."""
    monkeypatch.setattr(module, "PERIOD_S", 0.02)
    monkeypatch.setattr(module, "STILL_S", 0.3)
    simulated, sent = Simulated(monkeypatch), list[tuple[signal.Signals, float]]()
    brake = Brake(lambda: 1, 0.5, lambda pid, which: sent.append((which, simulated.now_s)))
    for number in range(20):
        at_s = 1.0 + 0.032 * number
        simulated.events += [(at_s, partial(brake.set_busy, True)), (at_s + 0.03, partial(brake.set_busy, False))]
    simulated.events.append((2.0, brake.release))
    brake.start()
    stops = [later - at for (which, at), (_, later) in pairwise(sent) if which == signal.SIGSTOP]
    assert stops[:20] == pytest.approx([0.03] * 20), "it ran beside requests, though it was ahead"


def test_it_does_not_stand_still_for_long_with_a_lock_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.05)
    monkeypatch.setattr(module, "STILL_S", 1000.0)
    sent: list[signal.Signals] = []
    held = [True]
    brake = Brake(lambda: 1, 0.5, lambda pid, which: sent.append(which), lambda: held[0])
    brake.start()
    time.sleep(0.3)
    brake.set_busy(True)
    wait_for(4, sent)
    assert sent[:4] == [signal.SIGSTOP, signal.SIGCONT] * 2
    brake.release()


def test_a_share_of_all_brakes_nothing() -> None:
    sent: list[object] = []
    free = Brake(lambda: 1, 1.0, lambda pid, which: sent.append(which))
    free.start()
    free.set_busy(True)
    free.release()
    assert not sent


def test_a_trainer_that_is_gone_is_no_error_and_the_next_one_is_stopped() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    with process() as following:
        pids = [gone.pid]
        asked: list[int] = []
        brake = Brake(lambda: asked.append(pids[0]) or pids[0], 0.1)
        brake.set_busy(True)
        brake.start()
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not asked and time.monotonic() < deadline:
                time.sleep(0.005)
            assert asked[:1] == [gone.pid]
            pids[0] = following.pid
            assert reaches(following, STOPPED)
        finally:
            brake.release()
