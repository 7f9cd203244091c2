"""A deletion reaches exports where they were written, and says which it does not find."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import pytest

from distillspec.errors import RunError
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.shard import load_shard
from distillspec.serving.online.state.layout import OnlineSettings

from ..conftest import Answer
from .conftest import SECRET, Quota, start_and_stop, traces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of exports, apart from the log's."""
    (tmp_path / "exported").mkdir()
    return tmp_path / "exported"


@pytest.fixture
def filled(replay: ReplayLog, answer: Answer) -> ReplayLog:
    """A log with three answers, one of them the secret tenant's."""
    replay.append([answer("a"), answer("secret-request", tenant="secret-tenant", prompt_ids=SECRET), answer("b")])
    return replay


def test_a_deleted_tenant_is_in_no_export_and_others_stay(filled: ReplayLog, folder: Path, key: LogKey) -> None:
    assert filled.export(folder / "all") == 3
    assert filled.export(folder / "one", "secret-tenant") == 1
    assert filled.export(folder / "none", "nobody") == 0
    assert traces(folder, "secret-request", SECRET) == {"all", "one"}
    assert filled.delete_tenant("secret-tenant") == 1
    assert traces(folder, "secret-request", SECRET) == set()
    assert [path.name for path in folder.iterdir()] == ["all"]
    assert [answer.request_id for answer in load_shard(folder / "all", key)] == ["a", "b"]
    assert (folder / "all").stat().st_mode & 0o777 == 0o600


def test_an_export_by_a_relative_path_is_found_from_elsewhere(
    filled: ReplayLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    filled.export(Path("all"))
    monkeypatch.chdir("/")
    filled.delete_tenant("secret-tenant")
    assert traces(folder, "secret-request", SECRET) == set()


def test_an_export_that_was_moved_is_told_once_in_one_line(
    filled: ReplayLog, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled.export(folder / "all")
    (folder / "all").rename(folder / "elsewhere")
    with caplog.at_level(logging.WARNING):
        filled.delete_tenant("secret-tenant")
        filled.delete_tenant("secret-tenant")
    (line,) = caplog.messages
    assert f"{folder}/all was moved or removed" in line
    assert "\n" not in line
    assert "secret-tenant" not in line


def test_a_file_that_is_no_export_any_more_stays_and_is_told(
    filled: ReplayLog, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled.export(folder / "all")
    (folder / "all").write_text("notes of somebody")
    with caplog.at_level(logging.WARNING):
        filled.delete_tenant("secret-tenant")
    (line,) = caplog.messages
    assert "which is no export any more" in line
    assert (folder / "all").read_text() == "notes of somebody"


def test_an_export_that_cannot_be_rewritten_is_tried_again_at_the_next_start(
    settings: OnlineSettings, key: LogKey, answer: Answer, folder: Path
) -> None:
    quota = Quota(1 << 20)
    replay = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0, write=quota)
    replay.append([answer("a")])
    replay.append([answer("secret-request", tenant="secret-tenant", prompt_ids=SECRET)])
    replay.export(folder / "all")
    quota.room = 0  # the tenant's own shard is removed whole, so that only the export has to be written
    with pytest.raises(RunError, match=r"disk is full: could not write .*all"):
        replay.delete_tenant("secret-tenant")
    assert traces(replay.folder, "secret-request", SECRET) == set()
    assert traces(folder, "secret-request", SECRET) == {"all"}
    quota.room = 1 << 20
    start_and_stop(replay)
    assert traces(folder, "secret-request", SECRET) == set()


class Killed(BaseException):
    """An exception that nothing handles, like a kill."""


def test_an_export_that_was_cut_short_is_known(
    filled: ReplayLog, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed before it is written: of a file that nobody knows nothing could be deleted."""

    def cut(*_: object) -> NoReturn:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("distillspec.serving.online.log.exports.save_shard", cut)
        with pytest.raises(Killed):
            filled.export(folder / "all")
    (folder / ".all.123.tmp").write_text("secret-request")  # as a process leaves it that is killed
    filled.delete_tenant("secret-tenant")
    assert "moved or removed" in caplog.text
    assert list(folder.iterdir()) == []


def test_what_is_exported_again_is_deleted_again(filled: ReplayLog, folder: Path, answer: Answer) -> None:
    filled.export(folder / "all")
    filled.delete_tenant("secret-tenant")
    filled.append([answer("secret-again", tenant="secret-tenant", time_s=3000.0)])
    filled.export(folder / "all")
    assert traces(folder, "secret-again") == {"all"}
    filled.delete_tenant("secret-tenant")
    assert traces(folder, "secret-again") == set()
