"""Lifeline of a launched process, which ends when the launching process has ended for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
STOPPABLE = "distill-trainer"  # 15 bytes at most


def end_with_parent() -> None:
    """Exit when standard input closes. The launching process holds its other end and never writes."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def allow_stops() -> None:
    """Tell the launcher that this process may be SIGSTOPped. If the launcher dies meanwhile, the kernel resumes it.

    Linux only. The launcher knows by the process name, which `ps` shows too.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))
        prctl(PR_SET_NAME, STOPPABLE.encode())


def allows_stops(pid: int) -> bool:
    """Return True if the process has called `allow_stops`."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == STOPPABLE
    except OSError:  # it has ended, or this is not Linux
        return False
