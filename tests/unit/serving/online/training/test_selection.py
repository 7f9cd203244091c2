"""Entries of an update: shares of tenants, new and old."""

from __future__ import annotations

import pytest

from distillspec.config import AdaptConfig
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.training.fairness import LEAST
from distillspec.serving.online.training.selection import Selection, newest_that_fit, select


def entry(number: int, tenant: str, tokens: int = 10) -> LogEntry:
    return LogEntry(number, 1, 0, f"r{number}", tenant, "d", "train", tokens, 5, 2, 0.0)


def counts_for(chosen: Selection, tenant: str) -> float:
    """A tenant's part of an update, by weight."""
    weighed = [(e.tenant, e.tokens * chosen.weights[e.tenant]) for e in (*chosen.new, *chosen.old)]
    return sum(tokens for name, tokens in weighed if name == tenant) / sum(tokens for _, tokens in weighed)


def test_no_tenant_counts_for_more_than_its_share() -> None:
    entries = [entry(i, "flood" if i % 10 else f"t{i % 30}") for i in range(300)]
    config = AdaptConfig(tenant_share=0.4)
    flooded = select(entries[200:], entries[:200], [], config, seed=0)
    assert counts_for(flooded, "flood") <= 0.4 + 1e-6
    assert flooded.new == entries[200:]  # nobody's text is left out
    assert flooded.capped == 90
    assert {tenant: weight for tenant, weight in flooded.weights.items() if tenant != "flood"} == {
        f"t{i}": 1.0 for i in (0, 10, 20)
    }
    alone = select([entry(i, "only") for i in range(5)], [], [], config, seed=0)
    assert (alone.weights, alone.capped) == ({"only": 1.0}, 0)
    both = select([entry(i, "ab"[i > 90]) for i in range(100)], [], [], AdaptConfig(tenant_share=0.2), seed=0)
    assert counts_for(both, "a") == pytest.approx(0.5)


def test_a_small_tenant_does_not_silence_a_large_one() -> None:
    """Five requests against 507, and a single request by an administrator's key."""
    for few in (5, 1):
        chosen = select([entry(i, "small" if i < few else "large") for i in range(512)], [], [], AdaptConfig(), seed=0)
        assert len(chosen.new) == 512
        assert chosen.weights == {"small": 1.0, "large": LEAST}
        assert counts_for(chosen, "large") > 0.8
        whole = AdaptConfig(max_steps=1, batch_tokens=5120, row_tokens=5120)  # all of it fits
        assert len(newest_that_fit(chosen.new, whole.max_steps * whole.batch_tokens)) == 512
        short = newest_that_fit(chosen.new, 1000)
        assert [e.tenant for e in short] == ["small"] * few + ["large"] * (100 - few)
        assert short[-1].number == 511


def test_an_update_mixes_new_and_old_and_flush_mode_does_not() -> None:
    new, old = [entry(i, "t") for i in range(100, 170)], [entry(i, "t") for i in range(100)]
    chosen = select(new, old, [], AdaptConfig(replay_share=0.3), seed=0)
    assert (len(chosen.new), len(chosen.old)) == (70, 30)
    assert select(new, old, [], AdaptConfig(mode="flush"), seed=0).old == []
