"""Replay log on disk: private, its own target's, and intact after any damage."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distillspec.config import AdaptConfig, LossConfig
from distillspec.errors import ConfigError
from distillspec.files import sha256_of
from distillspec.models import LanguageModel
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog, SteadyClock
from distillspec.serving.online.log.shard import save_shard
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.training.examples import training_example_of
from distillspec.serving.online.training.learning import learn

from ..conftest import Answer
from .conftest import manifest_of, names, start_and_stop


def test_what_is_written_is_read(replay: ReplayLog, answer: Answer) -> None:
    written = [answer(f"r{i}", tokens=3 + i) for i in range(3)]
    assert replay.append(written) == 3
    read = replay.load(replay.entries())
    for was, now in zip(written, read, strict=True):
        assert (now.prompt_ids, now.response_ids, now.policy) == (was.prompt_ids, was.response_ids, was.policy)
        assert (now.draft_versions, now.tenant) == (was.draft_versions, was.tenant)
        for name in ("ids", "logprobs"):
            assert torch.equal(getattr(now.signal, name), getattr(was.signal, name))
        torch.testing.assert_close(now.signal.tail, was.signal.tail, atol=1e-3, rtol=1e-3)
        for name in (
            "policy_logprobs",
            "policy_log_z",
            "outcomes",
            "draft_tokens",
            "draft_probs",
            "draft_entropies",
            "version_of",
        ):
            assert torch.equal(getattr(now, name), getattr(was, name))
    assert [e.request_id for e in replay.entries(after=1, up_to=2)] == ["r1"]


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
    config = AdaptConfig(max_steps=2, epochs=1)
    learnt, _ = learn(small_draft, [training_example_of(a, config) for a in kept], config, LossConfig())
    assert (learnt.problem, learnt.tokens) == ("", 40)


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

    monkeypatch.setattr("distillspec.data.shard_file.sha256_of", gone)
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
    with manifest_of(replay) as rows:
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
    """An embedded engine closes it too, and closes a log that an older release left open."""
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


def test_an_excluded_tenant_is_not_logged_by_any_process(
    replay: ReplayLog, settings: OnlineSettings, answer: Answer
) -> None:
    replay.append([answer("before", tenant="a")])
    ReplayLog(settings.layout.replay).exclude_tenant("a")  # distill replay action=exclude, beside a server
    assert replay.append([answer("meanwhile", tenant="a"), answer("other", tenant="b")]) == 1
    assert names(replay) == ["before", "other"]
    replay.exclude_tenant("a", excluded=False)
    replay.append([answer("again", tenant="a")])
    assert names(replay) == ["before", "other", "again"]


def test_a_log_of_an_earlier_release_is_read_on(replay: ReplayLog, settings: OnlineSettings, answer: Answer) -> None:
    """Its answers had a split in place of conversations. Those that were held out are like the others now."""
    replay.append([answer("a"), answer("b")])
    with manifest_of(replay) as rows:
        rows.execute("DROP INDEX answers_of_prompt")
        for column in ("conversation", "prompt", "prompt_tokens"):
            rows.execute(f"ALTER TABLE answers DROP COLUMN {column}")
        rows.execute("ALTER TABLE answers ADD COLUMN split TEXT NOT NULL DEFAULT 'held_out'")
    again = ReplayLog(settings.layout.replay, clock=lambda: 2000.0)
    again.append([answer("c"), answer("c again", prompt_ids=answer("c").prompt_ids)])
    assert names(again) == ["a", "b", "c", "c again"]
    assert [entry.conversation for entry in again.entries()] == [1, 2, 3, 3]
    assert len(again.load(again.entries())) == 4


def test_a_log_that_was_removed_goes_on_above_what_drafts_have_learnt_from(replay: ReplayLog, answer: Answer) -> None:
    """Its answers would count as learnt from until as many had come again."""
    replay.go_on_from(500)
    replay.append([answer("new")])
    assert [entry.number for entry in replay.entries()] == [501]
    replay.go_on_from(7)
    replay.append([answer("next")])
    assert replay.newest_number() == 502
