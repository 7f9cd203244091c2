"""The log stays within its budget and its retention."""

from __future__ import annotations

from distillspec.config import ReplayConfig
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings

from ..conftest import Answer
from .conftest import budgeted, names


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


def test_it_goes_where_nothing_is_written_any_more_too(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    """Such as in a pause."""
    now = [1000.0]
    replay = ReplayLog(settings.layout.replay, key, ReplayConfig(retention_days=1), clock=lambda: now[0])
    replay.append([answer("old", time_s=1000.0)])
    replay.expire()
    assert names(replay) == ["old"]
    now[0] += 86400 + 1
    replay.expire()
    assert names(replay) == []
