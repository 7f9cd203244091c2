"""What a program does at its end though the interpreter is not shut down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What a module holds is finalised by the interpreter's shutdown.
PROGRAM = """
import atexit, logging, sys, threading, time
from distillspec.training.leaving import leaving_at_once

class Finalised:
    def __del__(self):
        open("finalised", "w").close()

def run():
    sys.modules["kept"] = Finalised()
    logging.getLogger().addHandler(handler := logging.FileHandler("log", delay=True))
    logging.getLogger().warning("logged")
    handler.close = lambda: open("closed", "w").close()
    atexit.register(lambda: (time.sleep(0.1), open("registered", "w").close()))
    threading.Thread(target=lambda: (time.sleep(0.2), open("thread", "w").close())).start()
    print("written", end="")
    END

sys.exit(leaving_at_once(run))
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return 0", 0, ""),
        ("return 143", 143, ""),
        ("raise KeyError('k')", 1, "KeyError: 'k'"),
        ("sys.exit(5)", 5, ""),
        ("sys.exit()", 0, ""),
    ],
)
def test_all_is_done_but_the_interpreters_shutdown(tmp_path: Path, end: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("END", end)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "written"), done.stderr
    assert done.stderr.strip().endswith(said)
    assert {path.name for path in tmp_path.iterdir()} == {"log", "closed", "registered", "thread"}


def test_a_reader_that_is_gone_is_reported_as_ever(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("END", "time.sleep(0.5); return 0")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "BrokenPipeError" in process.stderr.read()
    assert process.returncode == 120
    assert (tmp_path / "finalised").exists()
