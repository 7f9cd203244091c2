"""metrics.jsonl, and what a signal is remembered as."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from distillspec.errors import RunError
from distillspec.training.interrupts import listen_for_stop
from distillspec.training.tracking import MetricsLog, flat


def test_rewinding_drops_what_lies_past_the_step_and_a_line_cut_by_a_crash(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.rewind(3)  # nothing there yet
    for step in (1, 2, 2, 3):
        log.add({"step": step, "train/loss": 0.5})
    with log.path.open("a") as stream:
        stream.write('{"step": 2, "train/l')
    log.rewind(2)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 2, 2]


def test_a_file_that_is_full_makes_room_for_a_new_one(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", most_bytes=40)
    for step in range(10, 17):
        log.add({"step": step})  # 13 bytes a line
    old = (tmp_path / "metrics.1.jsonl").read_text()
    assert [json.loads(line)["step"] for line in (old + log.path.read_text()).splitlines()] == list(range(10, 17))
    for step in range(17, 30):
        log.add({"step": step})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * 40
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises(RunError, match="the disk is full"):
        MetricsLog(tmp_path / "metrics.jsonl").add({"step": 1})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_earlier_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listen_for_stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert signal.getsignal(number) == before


def test_the_first_signal_names_the_exit_code_and_a_second_ctrl_c_is_obeyed_at_once() -> None:
    with listen_for_stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGTERM


def test_settings_become_plain_values_under_dotted_names() -> None:
    nested = {
        "seed": 1,
        "train": {"betas": [0.9, 0.95], "dtype": "auto", "max_steps": None},
        "loss": {"mix": {"fkl": 1}},
    }
    assert flat(nested) == {
        "seed": 1,
        "train.betas": "[0.9, 0.95]",
        "train.dtype": "auto",
        "train.max_steps": "None",
        "loss.mix.fkl": 1,
    }
