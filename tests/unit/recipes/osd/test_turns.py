"""Figures of the live comparison, from turns whose times are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distillspec.errors import RunError
from distillspec.recipes.osd.side import CpuSeconds, Turn
from distillspec.recipes.osd.turns import Plan, figures, plot, table, times_faster
from distillspec.serving.bench.records import LoadRecord, RequestRecord


def turn(began_s: float, *seconds_per_token: float) -> Turn:
    """A turn of ten seconds with one answer of 11 tokens a time."""
    requests = tuple(
        RequestRecord(f"load-{i}", "d", 0.0, 1.0, 1.0 + 10 * each, 5, 11, proposed=8, accepted=2)
        for i, each in enumerate(seconds_per_token)
    )
    return Turn(began_s, began_s + 10, LoadRecord(requests, (), 10.0), CpuSeconds(7.0, 2.0))


def side(name: str, *turns: Turn, folder: Path | None = None) -> Any:
    return SimpleNamespace(name=name, turns=list(turns), folder=folder)


def test_a_side_twice_as_fast_is_twice_as_fast() -> None:
    mine, theirs = [turn(0, 0.1, 0.2), turn(20, 0.1, 0.1)], [turn(10, 0.2, 0.4), turn(30, 0.2, 0.2)]
    ratio = times_faster(mine, theirs, seed=0)
    assert ratio is not None
    assert (ratio["median"], ratio["turns"], ratio["requests"]) == (pytest.approx(2.0), 2, 4)
    assert ratio["over_requests"]["mean"] == pytest.approx(2.0)
    assert times_faster([], [], seed=0) is None


def test_requests_that_one_side_lost_are_left_out() -> None:
    ratio = times_faster([turn(0, 0.1)], [turn(10, 0.1, 0.9)], seed=0)
    assert ratio is not None
    assert (ratio["requests"], ratio["over_requests"]["mean"]) == (1, pytest.approx(1.0))


def test_a_turn_whose_answers_came_at_once_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(RunError, match="--max-tokens"):
        times_faster([turn(0, 0.0)], [turn(10, 0.1)], seed=0)
    assert times_faster([turn(0, 0.0, 0.1)], [turn(10, 0.1, 0.0)], seed=0) is None, "no request has both times"


def test_the_shift_splits_the_turns_and_events_know_their_time_since_it(tmp_path: Path) -> None:
    events = [
        {"event": "figures", "time_s": 5.0, "trainer": {"cpu_s_by_work": {"judging": 1.0}}, "log": {"cpu_s": 2.0}},
        {"event": "verdict", "decision": "refused", "time_s": 5.0},
        {"event": "verdict", "decision": "promoted", "time_s": 64.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    static = side("static", turn(10, 0.1), turn(30, 0.2), turn(50, 0.2))
    online = side("online", turn(0, 0.1), turn(40, 0.2), turn(60, 0.1), folder=tmp_path)
    report = figures([static, online], Plan(["a", "b", "b"], shifted_from=1), seed=0)
    ratios = report["online_over_static"]
    assert ratios["own_domain"]["median"] == pytest.approx(1.0)
    assert ratios["shifted"]["median"] == pytest.approx(1.5)
    assert len(ratios["windows"]) == 1
    refused, promoted = report["events"]["online"]
    assert (refused["turn"], refused["since_shift_s"]) == (0, None)
    assert (promoted["turn"], promoted["since_shift_s"]) == (2, 10 + 4)  # ten of turn 2, and four of its own
    assert report["cpu"]["static"] == {"server_s": 21.0, "trainer_s": 6.0}
    assert "| 3 | b | 200.0 | 0.25 | 100.0 | 0.25 |" in table(report)
    assert "online over static, shifted: 1.500 in the median" in table(report)
    plot(report, tmp_path / "live.png")
    assert (tmp_path / "live.png").stat().st_size > 1000


def told(folder: Path, *events: dict[str, Any], trainer: tuple[dict[str, Any], ...] = ()) -> Path:
    """Write what server and trainer told to the online folder."""
    (folder / "trainer").mkdir()
    for file, lines in ((folder / "metrics.jsonl", events), (folder / "trainer" / "metrics.jsonl", trainer)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_updates_are_events_with_their_first_and_last_turn_and_mark_the_windows_they_ran_in(tmp_path: Path) -> None:
    update = {"event": "update", "began_s": 25.0, "time_s": 45.0, "version": "v2"}
    swap = {"event": "swap", "time_s": 50.0}
    own = [turn(20 * i, 0.1) for i in range(5)]
    theirs = [turn(20 * i + 10, 0.1) for i in range(5)]
    online = side("online", *own, folder=told(tmp_path, swap, trainer=(update,)))
    report = figures([side("static", *theirs), online], Plan(["a"] * 5, shifted_from=1), seed=0)
    first, second = report["events"]["online"]
    assert (first["event"], first["began_turn"], first["turn"]) == ("update", 1, 2)
    assert first["since_shift_s"] == pytest.approx(10 + 5)  # all of turn 2 (its own ten seconds), five of turn 3
    assert (second["event"], second["turn"]) == ("swap", 2)
    assert [window["updates"] for window in report["online_over_static"]["windows"]] == [1, 1, 1]
    late = {**update, "began_s": 81.0, "time_s": 82.0}
    (tmp_path / "trainer" / "metrics.jsonl").write_text(json.dumps(late) + "\n")
    report = figures([side("static", *theirs), online], Plan(["a"] * 5, shifted_from=1), seed=0)
    assert [window["updates"] for window in report["online_over_static"]["windows"]] == [0, 0, 1]


def test_processor_time_by_work_is_the_last_told_and_a_share_of_all(tmp_path: Path) -> None:
    lines = [
        {
            "event": "figures",
            "time_s": 10.0 * i,
            "trainer": {"cpu_s_by_work": {"loading": 1.0 * i, "judging": 0.01 * i, "learning": 2.0 * i}},
            "log": {"cpu_s": 0.1 * i},
        }
        for i in (1, 2)
    ]
    online = side("online", turn(0, 0.1), turn(20, 0.1), folder=told(tmp_path, *lines))
    static = side("static", turn(10, 0.1), turn(30, 0.1))
    report = figures([static, online], Plan(["a", "b"], shifted_from=1), seed=0)
    cpu = report["cpu"]["online"]
    assert cpu["by_work_s"] == {"loading": 2.0, "judging": 0.02, "learning": 4.0, "logging": 0.2}
    assert cpu["shares"]["judging"] == pytest.approx(0.02 / 18)
    assert (report["met"]["judging"], report["met"]["logging"]) == (True, True)
    assert report["cpu"]["static"] == {"server_s": 14.0, "trainer_s": 4.0}


def test_a_turn_that_one_side_has_yet_to_have_is_left_out() -> None:
    report = figures([side("static", turn(0, 0.1)), side("online")], Plan(["a", "b"], shifted_from=1), seed=0)
    assert report["domains"] == []
    assert report["online_over_static"]["shifted"] is None
