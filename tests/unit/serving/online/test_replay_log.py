"""The log on disk: small, bounded, private, and whole whatever happens to it."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from distillspec.config import AdaptConfig, LossConfig, ReplayConfig
from distillspec.errors import ConfigError, RunError
from distillspec.files import sha256_of, write_atomic
from distillspec.models import LanguageModel
from distillspec.serving.online.clock import SteadyClock
from distillspec.serving.online.layout import OnlineSettings
from distillspec.serving.online.learning import learn, lesson_of
from distillspec.serving.online.records import LoggedAnswer, LogKey
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.online.shard import save_shard
from distillspec.serving.online.writer import LogWriter

from .conftest import Answer

SECRET = tuple(range(100, 120))


def names(replay: ReplayLog) -> list[str]:
    return [entry.request_id for entry in replay.entries()]


def traces(folder: Path, request_id: str, *texts: Sequence[int]) -> set[str]:
    """Files in which a request can be read: its id, or its tokens as integers of any width or as JSON has them."""
    marks = [request_id.encode()]
    for text in texts:
        kinds = (torch.uint16, torch.int32, torch.int64)
        marks += [torch.tensor(text).to(kind).numpy().tobytes() for kind in kinds]
        marks += [mark.join(map(str, text)).encode() for mark in (",", ", ")]
    return {path.name for path in folder.rglob("*") if any(mark in _content(path) for mark in marks)}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:  # a temporary file, renamed since
        return b""


def start_and_stop(replay: ReplayLog) -> None:
    """As a server does."""
    writer = LogWriter(replay)
    writer.start()
    writer.stop()


def test_what_is_written_is_read(replay: ReplayLog, answer: Answer) -> None:
    written = [answer(f"r{i}", tokens=3 + i, split="held_out" if i == 1 else "train") for i in range(3)]
    assert replay.append(written) == 3
    read = replay.load(replay.entries())
    for was, now in zip(written, read, strict=True):
        assert (now.prompt_ids, now.response_ids, now.policy) == (was.prompt_ids, was.response_ids, was.policy)
        assert (now.draft_versions, now.split, now.tenant) == (was.draft_versions, was.split, was.tenant)
        for name in ("ids", "logprobs"):
            assert torch.equal(getattr(now.signal, name), getattr(was.signal, name))
        torch.testing.assert_close(now.signal.tail, was.signal.tail, atol=1e-3, rtol=1e-3)
        for name in ("outcomes", "draft_tokens", "draft_probs", "draft_entropies", "version_of"):
            assert torch.equal(getattr(now, name), getattr(was, name))
    assert [e.request_id for e in replay.entries(split="held_out")] == ["r1"]
    assert [e.request_id for e in replay.entries(after=1, up_to=2)] == ["r1"]


@pytest.mark.parametrize(("vocab_size", "limit"), [(49152, 320), (151_936, 500)])
def test_a_token_takes_less_than_half_a_kilobyte(answer: Answer, tmp_path: Path, vocab_size: int, limit: int) -> None:
    answers = [answer(f"r{i}", tokens=100, entries=64) for i in range(20)]
    save_shard(tmp_path / "s", answers, LogKey("w", "t", vocab_size, 64))
    assert (tmp_path / "s").stat().st_size / sum(map(len, answers)) <= limit


def test_draws_from_the_tail_are_kept_and_taught_beside_answers_without_any(
    replay: ReplayLog, answer: Answer, small_draft: LanguageModel
) -> None:
    plain = answer("plain")
    draws = {"tail_ids": torch.randint(3, 250, (20, 2)).int(), "tail_logprobs": torch.full((20, 2), -7.0).half()}
    drawn = answer("drawn")
    replay.append([replace(drawn, signal=replace(drawn.signal, **draws))])
    replay.append([plain])
    kept = replay.load(replay.entries())
    assert torch.equal(kept[0].signal.tail_ids, draws["tail_ids"])
    assert torch.equal(kept[0].signal.tail_logprobs, draws["tail_logprobs"])
    assert kept[1].signal.tail_ids is None
    replay.delete_tenant("nobody")
    config = AdaptConfig(max_steps=2)
    learnt = learn(small_draft, [lesson_of(a, config) for a in kept], config, LossConfig())
    assert (learnt.problem, learnt.tokens) == ("", 40)


def budgeted(settings: OnlineSettings, key: LogKey, answer: Answer, shards: int, **config: object) -> ReplayLog:
    """A log with room for about so many shards of one answer."""
    save_shard(Path(settings.online.folder).parent / "one", [answer("x")], key)
    size = (Path(settings.online.folder).parent / "one").stat().st_size
    made = ReplayConfig(max_mib=(shards + 0.5) * size / 2**20, **config)  # type: ignore[arg-type]
    return ReplayLog(settings.layout.replay, key, made, clock=lambda: 2000.0)


def test_fifo_keeps_the_newest(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    replay = budgeted(settings, key, answer, 4, keep="fifo")
    for i in range(10):
        replay.append([answer(f"r{i}")])
    assert names(replay) == ["r6", "r7", "r8", "r9"]
    assert len(list(replay.folder.glob("shard-*"))) == 4
    assert replay.sizes()["replaced_shards"] == 6


def test_the_reservoir_is_a_fair_sample_of_all_time_beside_the_newest(
    settings: OnlineSettings, key: LogKey, answer: Answer
) -> None:
    replay = budgeted(settings, key, answer, 12, keep="reservoir", fresh_share=0.25)
    for i in range(60):
        replay.append([answer(f"{i}")])
    kept = [int(name) for name in names(replay)]
    assert len(kept) <= 12
    assert kept[-3:] == [57, 58, 59]
    assert sum(number < 30 for number in kept) >= 2  # FIFO would have none


def test_what_is_past_its_retention_goes(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    now = [1000.0]
    replay = ReplayLog(settings.layout.replay, key, ReplayConfig(retention_days=1), clock=lambda: now[0])
    replay.append([answer("old", time_s=1000.0)])
    now[0] += 86400 + 1
    replay.append([answer("new", time_s=now[0])])
    assert names(replay) == ["new"]


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
    """Handled by nobody, as a kill is."""


def kill(*_: Any, **__: Any) -> NoReturn:
    raise Killed


def cut_before_a_rewrite(replay: ReplayLog, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "_write", kill)


def cut_before_the_old_file_goes(replay: ReplayLog, patch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink
    patch.setattr(Path, "unlink", lambda path, **how: kill() if path.name.startswith("shard-") else unlink(path, **how))


def cut_before_the_manifest_is_clean(replay: ReplayLog, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay._database, "scrub", kill)


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
    with replay._database.transaction() as rows:
        rows.execute("CREATE TRIGGER refuse BEFORE UPDATE ON shards BEGIN SELECT RAISE(ABORT, 'no room'); END")
    with pytest.raises(sqlite3.Error, match="no room"):
        replay.delete_tenant("secret-tenant")
    assert list(replay.folder.glob("*shard-*")) == before


def four_answers(replay: ReplayLog, answer: Answer) -> None:
    """In one shard; without the first, every other has the place of another one, and one of these is held out."""
    mine, held = answer("mine", tenant="secret-tenant"), answer("held", split="held_out")
    replay.append([mine, answer("a"), held, answer("b")])


def test_answers_listed_before_a_deletion_are_found_after_it(replay: ReplayLog, answer: Answer) -> None:
    four_answers(replay, answer)
    listed = replay.entries(split="train")
    replay.delete_tenant("secret-tenant")
    assert [a.request_id for a in replay.load(listed)] == ["a", "b"]


def test_a_deletion_in_the_middle_of_a_read_gives_nobody_anothers_answer(
    replay: ReplayLog, settings: OnlineSettings, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_answers(replay, answer)
    command, read = ReplayLog(settings.layout.replay), replay._load_shard

    def then_deleted(shard: int) -> list[LoggedAnswer]:
        found = read(shard)
        command.delete_tenant("secret-tenant")
        return found

    listed = replay.entries(split="train")
    monkeypatch.setattr(replay, "_load_shard", then_deleted)
    assert {a.request_id for a in replay.load(listed)} <= {"a", "b"}


def test_a_truncated_shard_is_skipped_named_and_counted_once(
    replay: ReplayLog, settings: OnlineSettings, answer: Answer
) -> None:
    replay.append([answer("a")])
    replay.append([answer("b")])
    assert replay.sizes()["refused_shards"] == 0
    shard = sorted(replay.folder.glob("shard-*"), key=lambda p: p.stat().st_mtime_ns)[0]
    shard.write_bytes(shard.read_bytes()[:-7])
    trainer = ReplayLog(settings.layout.replay)
    for reader in (trainer, trainer, replay):
        assert [a.request_id for a in reader.load(reader.entries())] == ["b"]
        assert "truncated or changed" in reader.refused[shard.name]
        assert replay.sizes()["refused_shards"] == 1
    assert ReplayLog(settings.layout.replay).sizes()["refused_shards"] == 1  # after a restart


def test_a_shard_that_goes_while_it_is_read_is_not_called_damaged(
    replay: ReplayLog, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay.append([answer("a")])

    def gone(path: Path) -> str:
        path.unlink()
        return sha256_of(path)

    monkeypatch.setattr("distillspec.serving.online.replay_log.sha256_of", gone)
    assert replay.load(replay.entries()) == []
    assert replay.sizes()["refused_shards"] == 0


def test_another_targets_log_is_refused(replay: ReplayLog, settings: OnlineSettings, answer: Answer) -> None:
    replay.append([answer("a")])
    foreign = LogKey("other-weights", replay.key.tokenizer_hash, replay.key.vocab_size, replay.key.entries)
    with pytest.raises(ConfigError, match="another weights_hash"):
        ReplayLog(settings.layout.replay, foreign)
    # A shard that somebody put in the place of ours, digest and all.
    (shard,) = replay.folder.glob("shard-*")
    save_shard(shard, [answer("a")], foreign)
    with replay._database.transaction() as rows:
        rows.execute("UPDATE shards SET sha256 = ?", (sha256_of(shard),))
    assert replay.load(replay.entries()) == []
    assert "another weights_hash" in replay.refused[shard.name]


def test_manifest_and_shards_that_disagree_are_reconciled_at_the_start(
    replay: ReplayLog, settings: OnlineSettings, key: LogKey, answer: Answer
) -> None:
    for name in "abc":
        replay.append([answer(name)])
    shards = sorted(replay.folder.glob("shard-*"), key=lambda p: p.stat().st_mtime_ns)
    shards[0].unlink()  # known, but gone
    shards[1].write_bytes(b"short")  # known, but damaged
    save_shard(replay.folder / "shard-stray.safetensors", [answer("x")], key)  # written, but never entered
    (replay.folder / ".shard-half.safetensors.17.tmp").write_bytes(b"half")
    again = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0)
    start_and_stop(again)
    assert names(again) == ["c"]
    assert [path.name for path in again.folder.glob("*shard-*")] == [shards[2].name]
    sizes = again.sizes()
    assert (sizes["damaged_shards"], sizes["stray_files"]) == (2, 2)


class Quota:
    """A disk with room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path, write) -> None:  # type: ignore[no-untyped-def]
        def limited(temporary: Path) -> None:
            write(temporary)
            size = temporary.stat().st_size
            if size > self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= size

        write_atomic(path, limited)


def test_a_full_disk_costs_answers_and_nothing_else(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    quota = Quota(0)
    replay = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0, write=quota)
    with pytest.raises(RunError, match="disk is full"):
        replay.append([answer("a")])
    writer = LogWriter(replay)
    writer.start()
    assert writer.put(answer("b"))
    writer.flush()
    assert writer.counters["dropped_disk"] == 1
    quota.room = 1 << 20
    assert writer.put(answer("c"))
    writer.flush()
    writer.stop()
    assert names(replay) == ["c"]
    assert list(replay.folder.glob("*.tmp")) == []


def test_a_deletion_that_a_reader_holds_up_is_not_said_to_be_done(replay: ReplayLog, answer: Answer) -> None:
    replay.append([answer("a", tenant="gone"), answer("b")])
    replay._database._connection.execute("PRAGMA busy_timeout = 0")
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


def test_a_full_queue_drops_at_once(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    replay = ReplayLog(settings.layout.replay, key, ReplayConfig(max_waiting=50), clock=lambda: 2000.0)
    writer = LogWriter(replay)  # not started: nobody takes anything away
    assert [writer.put(answer(f"r{i}", tokens=20)) for i in range(4)] == [True, True, False, False]
    assert writer.waiting_tokens == 40


def test_jumps_of_the_machines_clock_change_nothing() -> None:
    wall, steady = [1000.0], [50.0]
    clock = SteadyClock(0.0, lambda: wall[0], lambda: steady[0])
    wall[0], steady[0] = 9e9, 51.0
    assert clock() == 1001.0
    wall[0], steady[0] = -5.0, 52.0
    assert clock() == 1002.0
    assert SteadyClock(2000.0, lambda: 10.0, lambda: 0.0)() == 2000.0  # set back while nothing ran


def test_a_log_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no log in"):
        ReplayLog(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_the_log_is_closed_to_others_whatever_the_umask(
    settings: OnlineSettings, key: LogKey, answer: Answer, tmp_path: Path
) -> None:
    """In an engine of one's own, too; and a log that an older version left open is closed."""
    before = os.umask(0o022)
    try:
        folder = tmp_path / "mine" / "replay"
        folder.mkdir(parents=True)
        (folder / "manifest.sqlite").touch()
        log = ReplayLog(folder, key, settings.replay)
        log.append([answer("r1")])
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        log.close()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(modes) >= 4
    assert {name: mode for name, mode in modes.items() if mode != 0o600} == {}
