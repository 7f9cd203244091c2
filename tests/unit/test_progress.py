"""Progress lines and bars."""

from __future__ import annotations

import pytest

from distillspec.progress import ProgressLine, TokenMeter, progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass only when a test says so."""
    now = [100.0]
    monkeypatch.setattr("distillspec.progress.time.monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading") as line:
        for second in range(40):
            clock[0] = 100.0 + second
            line.update(second / 40, f"{second} read")
    said = capsys.readouterr().out.splitlines()
    assert said == ["reading …", "reading:  38 % 15 read", "reading:  75 % 30 read", "reading: done in 39 s"]


def test_the_time_left_follows_the_pace_since_the_first_call(clock: list[float]) -> None:
    line = ProgressLine("training", None)
    assert line.left(0.5) == "?"  # a resumed run: half is done, nothing is known of the pace
    clock[0] += 30
    assert line.left(0.625) == "1:30"
    clock[0] += 30
    assert line.left(0.75) == "1:00"


def test_the_meter_counts_tokens_and_time_whichever_is_further(clock: list[float]) -> None:
    line = ProgressLine("sampling", None)
    shown: list[tuple[float, str]] = []
    line.update = lambda fraction, note: shown.append((fraction, note))  # type: ignore[method-assign]
    meter = TokenMeter(line, expected_tokens=1000, limit_s=100)
    clock[0] += 10
    meter(50)
    clock[0] += 10
    meter(450)
    assert [fraction for fraction, _ in shown] == [0.1, 0.5]
    assert shown[1][1].startswith("500 tokens, 25/s")
