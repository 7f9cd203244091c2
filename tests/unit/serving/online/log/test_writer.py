"""The writer drops what does not fit, at once, and survives a full disk."""

from __future__ import annotations

import pytest

from distillspec.config import ReplayConfig
from distillspec.errors import RunError
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.writer import LogWriter
from distillspec.serving.online.state.layout import OnlineSettings

from ..conftest import Answer
from .conftest import Quota, names


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


def test_a_full_queue_drops_at_once(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    replay = ReplayLog(settings.layout.replay, key, ReplayConfig(max_waiting=50), clock=lambda: 2000.0)
    writer = LogWriter(replay)  # not started: nobody takes anything away
    assert [writer.put(answer(f"r{i}", tokens=20)) for i in range(4)] == [True, True, False, False]
    assert writer.waiting_tokens == 40
