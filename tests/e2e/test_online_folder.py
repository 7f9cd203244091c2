"""Each command on an online folder refuses one that cannot be used: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SERVE = "serve target=tiny target.device=cpu server.port=0 online=on"


@pytest.mark.parametrize("command", [SERVE, "adapt target=tiny once=true", "replay", "versions"])
@pytest.mark.parametrize("part", ["online", "online/versions"])
def test_a_file_in_place_of_the_folder_is_one_line(distill: Any, tmp_path: Path, command: str, part: str) -> None:
    (tmp_path / part).parent.mkdir(exist_ok=True)
    (tmp_path / part).write_text("x")
    outcome = distill(*command.split(), "online.folder=online")
    assert (outcome.code, outcome.err) == (2, f"distill: online.folder=online cannot be used: {part} is a file\n")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / part]
