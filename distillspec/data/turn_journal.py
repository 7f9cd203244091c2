"""Journal of the user's turns that a target has written so far, so that an interrupted run goes on from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from distillspec.files import clear_disk_errors, read_lines, write_text


class Turn(NamedTuple):
    """A user's turn.

    finished: the target ended it itself.
    """

    text: str
    finished: bool


class TurnJournal:
    """Turns by attempt and index, each appended to a file as soon as it is written.

    Args:
        path: file of one JSON object a line: the key, then the turns.
        key: what the turns depend on. A file with another key is begun anew.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path = path
        self._attempts: dict[int, dict[int, Turn]] = {}
        first, *rows = read_lines(path) or [{}]
        rows = rows if first == key else []
        for row in rows:
            self._of(row["attempt"])[row["index"]] = Turn(row["text"], row["finished"])
        # Written anew: behind half a line, the next one could not be read.
        write_text(path, "".join(json.dumps(row) + "\n" for row in (key, *rows)))

    def turns(self, attempt: int) -> Mapping[int, Turn]:
        """Return the turns of an attempt, by index. Those that `add` keeps later are in it too."""
        return self._of(attempt)

    def add(self, attempt: int, index: int, turn: Turn) -> None:
        """Keep a turn.

        Raises:
            RunError: the disk is full.
        """
        self._of(attempt)[index] = turn
        row = {"attempt": attempt, "index": index, **turn._asdict()}
        with clear_disk_errors(self.path), self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")

    def _of(self, attempt: int) -> dict[int, Turn]:
        return self._attempts.setdefault(attempt, {})
