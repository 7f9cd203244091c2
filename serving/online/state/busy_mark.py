"""The server's mark that requests run: eight bytes in a file that server and trainer map into memory.

A JSON file takes milliseconds to write and to read, and a step of the engine takes ten.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from distillspec.files import private_file

UNTIL = struct.Struct("d")  # seconds on the machine's monotonic clock, the same for all processes
LONGEST_STEP_S = 10.0  # a mark that is not set again fades, so that a server that died keeps nobody waiting


class BusyMark:
    """Requests run until the time in the file, or until it is cleared.

    Args:
        path: of the file. It is made where it is missing.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        private_file(path)
        with path.open("r+b") as file:
            file.truncate(UNTIL.size)
            self._map = mmap.mmap(file.fileno(), UNTIL.size)

    def set(self, busy: bool) -> None:
        UNTIL.pack_into(self._map, 0, self._clock() + LONGEST_STEP_S if busy else 0.0)

    @property
    def busy(self) -> bool:
        # A time further ahead was written before the machine started anew.
        return 0.0 < UNTIL.unpack_from(self._map, 0)[0] - self._clock() <= LONGEST_STEP_S

    def close(self) -> None:
        self._map.close()
