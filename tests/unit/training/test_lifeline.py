"""A process that may be stopped ends with the process that launched it, stopped or not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from distillspec.training.lifeline import STOPPABLE, allows_stops

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux alone")
PATIENCE_S = 30.0
CHILD = (
    "import time; from distillspec.training.lifeline import allow_stops, end_with_parent;"
    "end_with_parent(); allow_stops(); time.sleep(300)"
)
PARENT = (
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True);"
    "print(child.pid, flush=True); time.sleep(300)"
)


def comes_true(wanted: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not wanted():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("stopped", [True, False])
def test_it_ends_with_a_killed_parent(stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert comes_true(lambda: allows_stops(child.pid))
            if stopped:
                child.send_signal(signal.SIGSTOP)
                assert comes_true(lambda: child.status() == psutil.STATUS_STOPPED)
            parent.kill()
            assert comes_true(lambda: has_ended(child))
        finally:
            parent.kill()
            if not has_ended(child):
                child.kill()


def test_another_process_does_not_allow_stops() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as other:
        try:
            assert not allows_stops(other.pid)
        finally:
            other.kill()
    assert not allows_stops(other.pid), "it is gone"


def test_the_name_fits_the_kernel() -> None:
    assert len(STOPPABLE.encode()) <= 15
