"""The mark that requests run, as another process sees it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from distillspec.serving.online.state.busy_mark import LONGEST_STEP_S, BusyMark


def test_what_one_sets_another_sees_until_it_is_cleared_or_fades(tmp_path: Path) -> None:
    now = [1000.0]
    with (
        closing(BusyMark(tmp_path / "busy", lambda: now[0])) as server,
        closing(BusyMark(tmp_path / "busy", lambda: now[0])) as trainer,
    ):
        assert not trainer.busy, "nothing was set yet"
        server.set(True)
        assert trainer.busy
        server.set(False)
        assert not trainer.busy
        server.set(True)
        now[0] += LONGEST_STEP_S - 0.1
        assert trainer.busy
        now[0] += 0.2
        assert not trainer.busy, "the server may have died"


def test_a_mark_from_before_the_machine_started_anew_says_nothing(tmp_path: Path) -> None:
    with closing(BusyMark(tmp_path / "busy", lambda: 90_000.0)) as before:
        before.set(True)
    with closing(BusyMark(tmp_path / "busy", lambda: 5.0)) as after:
        assert not after.busy


def test_its_file_is_for_this_account_alone(tmp_path: Path) -> None:
    with closing(BusyMark(tmp_path / "busy")):
        assert (tmp_path / "busy").stat().st_mode & 0o077 == 0
