"""A folder that cannot be used is refused in one line, before anything is made."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.online.state.layout import Layout

OVERRIDES, DROP = (1, 2), 24  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; PR_CAPBSET_DROP
CHECK = """
import sys
from pathlib import Path
from distillspec.errors import ConfigError
from distillspec.serving.online.state.layout import Layout
try:
    Layout(Path(sys.argv[1])).check_usable()
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("part", ["", "replay", "versions", "trainer", "answers"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, part: str) -> None:
    root = tmp_path / "online"
    file = root / part
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(ConfigError) as refusal:
        Layout(root).check_usable()
    assert str(refusal.value) == f"online.folder={root} cannot be used: {file} is a file"


def obey_permissions() -> None:
    """Let the next program be refused what permissions refuse, whatever account runs it."""
    for override in OVERRIDES:
        ctypes.CDLL(None).prctl(DROP, override, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize(
    ("part", "mode", "said"),
    [
        ("", 0o000, "cannot be read: no permission for {root}/replay"),
        ("", 0o500, "cannot be used: no permission to read and write {root}"),
        ("versions", 0o500, "cannot be used: no permission to read and write {root}/versions"),
        (
            "replay/manifest.sqlite",
            0o400,
            "cannot be used: no permission to read and write {root}/replay/manifest.sqlite",
        ),
    ],
)
def test_a_folder_without_permission_is_named(tmp_path: Path, part: str, mode: int, said: str) -> None:
    root = tmp_path / "online"
    (root / "replay").mkdir(parents=True)
    (root / "versions").mkdir()
    (root / "replay" / "manifest.sqlite").touch()
    (root / part).chmod(mode)
    command = [sys.executable, "-c", CHECK, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=obey_permissions)
    (root / part).chmod(0o700)
    assert done.stdout == f"online.folder={root} {said.format(root=root)}\n", done.stderr


def test_a_folder_that_is_not_there_can_be_made(tmp_path: Path) -> None:
    Layout(tmp_path / "a" / "b").check_usable()
    assert list(tmp_path.iterdir()) == []
