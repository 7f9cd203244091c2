"""Records are passed on with their time and counted. A full disk costs one record."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from distillspec.errors import RunError
from distillspec.serving.online.reporting import Reporter


def test_records_have_a_time_and_verdicts_count_by_decision() -> None:
    records: list[dict[str, Any]] = []
    reporter = Reporter(records.append, lambda: 5.0)
    reporter.tell({"event": "swap", "version": "v1"})
    reporter.tell({"event": "verdict", "decision": "refused"})
    reporter.alarm("collapsed")
    assert records[0] == {"time_s": 5.0, "event": "swap", "version": "v1"}
    assert records[2] == {"time_s": 5.0, "event": "alarm", "message": "collapsed"}
    assert reporter.events == {"swap": 1, "refused": 1, "alarm": 1}


def test_a_record_that_cannot_be_written_is_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def full(record: dict[str, Any]) -> None:
        raise RunError("the disk is full")

    reporter = Reporter(full, lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        reporter.tell({"event": "swap"})
    assert reporter.events == {"swap": 1}
    assert "the disk is full" in caplog.text
