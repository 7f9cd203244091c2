"""A deleted tenant leaves no byte, and a deletion that was cut short is finished."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from distillspec.errors import RunError
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings

from ..conftest import Answer
from .conftest import SECRET, Quota, budgeted, manifest_of, names, start_and_stop, traces


def test_a_deleted_tenant_leaves_no_byte(replay: ReplayLog, answer: Answer) -> None:
    mine = answer("secret-request", tenant="secret-tenant", prompt_ids=SECRET)
    others = [answer(f"r{i}") for i in range(3)]
    replay.append([others[0], mine, others[1]])
    replay.append([mine])
    replay.append([others[2]])
    assert replay.delete_tenant("secret-tenant") == 2
    assert traces(replay.folder, "secret-request", SECRET, mine.response_ids) == set()
    read = replay.load(replay.entries())
    assert [(a.request_id, a.response_ids) for a in read] == [(a.request_id, a.response_ids) for a in others]
    # What was recorded before the deletion and still waited stays out, later traffic does not.
    assert replay.append([mine]) == 0
    assert replay.append([answer("later", tenant="secret-tenant", time_s=3000.0)]) == 1


class Killed(BaseException):
    """An exception that nothing handles, like a kill."""


def kill(*_: Any, **__: Any) -> NoReturn:
    raise Killed


def cut_before_a_rewrite(replay: ReplayLog, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay.files, "write", kill)


def cut_before_the_old_file_goes(replay: ReplayLog, patch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink
    patch.setattr(Path, "unlink", lambda path, **how: kill() if path.name.startswith("shard-") else unlink(path, **how))


def cut_before_the_manifest_is_clean(replay: ReplayLog, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay.manifest, "finish_rewrites", kill)


@pytest.mark.parametrize("then", [start_and_stop, lambda replay: replay.delete_tenant("somebody-else")])
@pytest.mark.parametrize("cut", [cut_before_a_rewrite, cut_before_the_old_file_goes, cut_before_the_manifest_is_clean])
def test_a_deletion_that_was_cut_short_is_finished_by_the_next_start_or_deletion(
    replay: ReplayLog,
    settings: OnlineSettings,
    key: LogKey,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    cut: Callable[[ReplayLog, pytest.MonkeyPatch], None],
    then: Callable[[ReplayLog], Any],
) -> None:
    mine = [answer(f"secret-request-{i}", tenant="secret-tenant", prompt_ids=SECRET) for i in range(2)]
    others = [answer(f"r{i}") for i in range(3)]
    replay.append([others[0], mine[0], others[1]])
    replay.append([mine[1]])
    replay.append([others[2]])
    # Its clock is far ahead: by the time on its record, what is logged later is older than the deletion.
    command = ReplayLog(settings.layout.replay, clock=lambda: 9000.0)
    with monkeypatch.context() as patch:
        cut(command, patch)
        with pytest.raises(Killed):
            command.delete_tenant("secret-tenant")
    assert names(replay) == ["r0", "r1", "r2"]
    assert traces(replay.folder, "secret-request", SECRET)
    later = answer("later", tenant="secret-tenant", time_s=3000.0)
    assert replay.append([later]) == 1
    again = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 4000.0)
    then(again)
    texts = (SECRET, mine[0].response_ids, mine[1].response_ids)
    assert traces(replay.folder, "secret-request", *texts) == set()
    read = again.load(again.entries())
    assert [(a.request_id, a.response_ids) for a in read] == [(a.request_id, a.response_ids) for a in (*others, later)]
    assert len(list(replay.folder.glob("*shard-*"))) == again.sizes()["shards"] == 3


def test_answers_that_aged_out_are_not_taken_for_deleted(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    replay = budgeted(settings, key, answer, 4, keep="fifo")
    replay.delete_tenant("back-again")
    for i in range(8):
        replay.append([answer(f"r{i}", tenant="back-again", time_s=2001.0 + i)])
        if i == 3:
            learnt_from = replay.entries()
    assert names(replay) == ["r4", "r5", "r6", "r7"]
    with replay.still_there(learnt_from):
        pass


def test_answers_deleted_by_a_process_whose_clock_is_behind_are_missed(
    settings: OnlineSettings, replay: ReplayLog, answer: Answer
) -> None:
    replay.append([answer("a", tenant="gone", time_s=1999.0), answer("b")])
    learnt_from = replay.entries()
    ReplayLog(settings.layout.replay, clock=lambda: 500.0).delete_tenant("gone")
    with pytest.raises(RunError, match="was deleted while"), replay.still_there(learnt_from):
        pass


def test_a_disk_that_is_full_at_the_start_leaves_a_deletion_to_the_next(
    settings: OnlineSettings, key: LogKey, answer: Answer
) -> None:
    quota = Quota(1 << 20)
    replay = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0, write=quota)
    replay.append([answer("a"), answer("secret-request", tenant="secret-tenant")])
    quota.room = 0
    with pytest.raises(RunError, match="disk is full"):
        replay.delete_tenant("secret-tenant")
    start_and_stop(replay)
    assert names(replay) == ["a"]
    assert traces(replay.folder, "secret-request")
    quota.room = 1 << 20
    start_and_stop(replay)
    assert traces(replay.folder, "secret-request") == set()
    assert [a.request_id for a in replay.load(replay.entries())] == ["a"]


def test_a_rewrite_that_is_not_entered_leaves_no_file(replay: ReplayLog, answer: Answer) -> None:
    replay.append([answer("a"), answer("secret-request", tenant="secret-tenant")])
    before = list(replay.folder.glob("*shard-*"))
    with manifest_of(replay) as rows:
        rows.execute("CREATE TRIGGER refuse BEFORE UPDATE ON shards BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(RunError, match=r"manifest\.sqlite: no room$"):
        replay.delete_tenant("secret-tenant")
    assert list(replay.folder.glob("*shard-*")) == before


def four_answers(replay: ReplayLog, answer: Answer) -> None:
    """Log four answers in one shard. Without the first, the others move up."""
    replay.append([answer("mine", tenant="secret-tenant"), answer("a"), answer("b"), answer("c")])


def test_answers_listed_before_a_deletion_are_found_after_it(replay: ReplayLog, answer: Answer) -> None:
    four_answers(replay, answer)
    listed = replay.entries()
    replay.delete_tenant("secret-tenant")
    assert [a.request_id for a in replay.load(listed)] == ["a", "b", "c"]


def test_a_deletion_in_the_middle_of_a_read_gives_nobody_anothers_answer(
    replay: ReplayLog, settings: OnlineSettings, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_answers(replay, answer)
    command, read = ReplayLog(settings.layout.replay), replay.files.load

    def then_deleted(shard: int) -> list[LoggedAnswer]:
        found = read(shard)
        command.delete_tenant("secret-tenant")
        return found

    listed = replay.entries()
    monkeypatch.setattr(replay.files, "load", then_deleted)
    assert {a.request_id for a in replay.load(listed)} <= {"a", "b", "c"}


def test_a_deletion_that_a_reader_holds_up_is_not_said_to_be_done(
    settings: OnlineSettings, key: LogKey, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distillspec.serving.online.state.database.PATIENCE_S", 0.0)
    replay = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0)
    replay.append([answer("a", tenant="gone"), answer("b")])
    reader = sqlite3.connect(replay.folder / "manifest.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM answers").fetchall()
    with pytest.raises(RunError, match="deleted rows are still in"):
        replay.delete_tenant("gone")
    assert names(replay) == ["b"]
    assert "manifest.sqlite-wal" in traces(replay.folder, "gone")
    reader.execute("COMMIT")
    reader.close()
    start_and_stop(replay)  # the next start finishes it
    assert traces(replay.folder, "gone") == {"manifest.sqlite"}  # the name in the list of deletions
