"""Run by a test in a process of its own: a trainer is killed as it begins each stage, then one is let through.

Every trainer is a fork of a process that has loaded everything and has not trained itself.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from distillspec.serving.online.training.process import read_settings, run_trainer

STAGES = ("selecting", "loading", "learning", "saving", "registering", None)


def main(root: Path) -> None:
    for deadly in STAGES:
        child = os.fork()
        if child == 0:
            _train(root, deadly)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("trainer:", deadly, "killed" if killed else os.waitstatus_to_exitcode(status), flush=True)


def _train(root: Path, deadly: str | None) -> None:
    def on_stage(stage: str) -> None:
        if stage == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        run_trainer(read_settings(root), lambda: False, once=True, on_stage=on_stage)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
