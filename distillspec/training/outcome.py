"""Error messages from the processes of a launch to the launching one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from distillspec.errors import ConfigError, RunError
from distillspec.files import write_json


@dataclass(frozen=True)
class RankOutcome:
    """The error that ended process `rank`."""

    error: str  # name of the exception
    message: str  # one line
    time: float  # seconds since the epoch

    @classmethod
    def write(cls, folder: Path, rank: int, error: BaseException) -> None:
        ours = isinstance(error, (ConfigError, RunError))
        message = str(error) if ours else next(iter(str(error).strip().splitlines()), "")
        write_json(_file(folder, rank), asdict(cls(type(error).__name__, message, time.time())))

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankOutcome | None:
        """Return the error of process `rank`, or None if it left none: it did well, or was killed."""
        path = _file(folder, rank)
        return cls(**json.loads(path.read_text())) if path.is_file() else None


def _file(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"rank-{rank}.error.json"
