"""The writer drops what does not fit, at once, and survives a full disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.config import ReplayConfig
from distillspec.errors import RunError
from distillspec.serving.online.log import writer as module
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.writer import LogWriter
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.types import StateRequest

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
    assert writer.cpu_s > 0
    assert names(replay) == ["c"]
    assert list(replay.folder.glob("*.tmp")) == []


def test_a_full_queue_drops_at_once(settings: OnlineSettings, key: LogKey, answer: Answer) -> None:
    replay = ReplayLog(settings.layout.replay, key, ReplayConfig(max_waiting=50), clock=lambda: 2000.0)
    writer = LogWriter(replay)  # not started: nobody takes anything away
    assert [writer.put(answer(f"r{i}", tokens=20)) for i in range(4)] == [True, True, False, False]
    assert writer.waiting_tokens == 40


def test_states_that_have_no_room_are_left_out_and_the_answer_stays(
    settings: OnlineSettings, key: LogKey, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = ReplayLog(settings.layout.replay, key, settings.replay, clock=lambda: 2000.0)
    states = StateRequest((1,)).record(torch.ones(25, 8))
    monkeypatch.setattr(module, "MOST_STATES", 2 * states.nbytes)
    writer = LogWriter(replay)
    for name in "abc":
        assert writer.put(replace(answer(name), states=states))
    assert writer.counters["without_states"] == 1
    writer.start()
    writer.flush()
    assert [logged.states is not None for logged in replay.load(replay.entries())] == [True, True, False]
    assert writer.put(replace(answer("d"), states=states))
    writer.stop()
    (last,) = replay.load(replay.entries(after=3))
    assert last.states is not None, "there is room again"
    assert torch.equal(last.states.values, states.values)
