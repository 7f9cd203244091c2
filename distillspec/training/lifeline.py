"""Lifeline of a launched process, which ends when the launching process has ended for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Exit when standard input closes. The launching process holds its other end and never writes."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def go_on_without_parent() -> None:
    """Go on when the launching thread has ended, even if it had stopped this process: it could not end otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT))
