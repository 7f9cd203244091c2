"""A proposer that fails rests, longer after each step in which it did."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest

from distillspec.serving import Request
from distillspec.serving.base.backoff import FIRST
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.proposers.base import EMPTY, Proposer
from distillspec.serving.proposers.draft_health import DraftHealth


class Failing:
    """Fails whenever it is told what was accepted."""

    caches = ()
    version = ""

    def propose(self, requests: Sequence[Any]) -> list[TokenTree]:
        return [EMPTY] * len(requests)

    def committed(self, sequence: SequenceState, tree: TokenTree, path: Sequence[int]) -> None:
        raise RuntimeError("no such place")

    def leave_slot(self, sequence: SequenceState) -> None: ...

    def release(self) -> None: ...


def test_what_all_rows_of_a_step_share_is_one_failure(caplog: pytest.LogCaptureFixture) -> None:
    health = DraftHealth(cast(Proposer, Failing()), "half", ["half"])
    rows = [SequenceState(str(i), Request(str(i), (5, 6)), 0, i, [5, 6], frozenset(), 64, slot=i) for i in range(8)]
    with caplog.at_level(logging.WARNING):
        for row in rows:
            health.committed(row, EMPTY, ())
    assert all(row.failed_sources == {"half"} for row in rows)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"no speculation for {FIRST} steps" in line
    waited = 0
    while health.paused:
        health.step()
        waited += 1
    assert waited == FIRST
    health.committed(rows[0], EMPTY, ())
    for _ in range(2 * FIRST - 1):
        health.step()
        assert health.paused
    health.step()
    assert not health.paused
