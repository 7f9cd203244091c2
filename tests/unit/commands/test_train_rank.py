"""One process of a launch: what it leaves when native code crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CRASH = """
import os, signal
from distillspec.commands import train_rank

def run(folder, rank):
    os.kill(os.getpid(), signal.SIGSEGV)

train_rank.run = run
train_rank.main()
"""


def test_a_crash_of_native_code_leaves_its_python_stack() -> None:
    held, ours = os.pipe()  # the process ends when its standard input does
    try:
        done = subprocess.run(
            [sys.executable, "-c", CRASH, "folder"],
            env={**os.environ, "RANK": "0"},
            stdin=held,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(held)
        os.close(ours)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert "in run" in done.stderr
