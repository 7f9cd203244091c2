"""Goodput is compared on every domain alone, by rounds."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.recipes.spin.live_tables import best_by_domain, best_draft, live_table, rates_alone

SPEED = [100.0, 120.0, 90.0, 110.0]
# Side → tokens a second over those of no speculation on maths and on SQL.
OVER = {
    "none": (1.0, 1.0),
    "A": (1.5, 1.0),
    "B": (1.0, 1.25),
    "A+ngram": (1.4, 1.0),
    "B+ngram": (1.0, 1.2),
    "goodput": (1.5, 1.2),
    "goodput+ngram": (1.4, 1.1),
    "lookup_else_model": (1.2, 1.2),
}
DRAFTS = ("A", "B")


def rates(times: float) -> list[float]:
    return [times * speed for speed in SPEED]


def batch(**further: Any) -> dict[str, Any]:
    """Return the figures of four rounds."""
    idle = {"padding": 0.1, "target_idle": 0.2, "draft_idle": 0.7}
    return {
        "tokens_per_s": {name: rates(2 / (1 / maths + 1 / sql)) for name, (maths, sql) in OVER.items()},
        "by_domain": {name: {"maths": rates(maths), "sql": rates(sql)} for name, (maths, sql) in OVER.items()},
        "idle": dict.fromkeys(OVER, idle),
        **further,
    }


def test_the_best_draft_of_each_domain_is_what_there_is_to_earn() -> None:
    assert best_draft(batch(), DRAFTS) == "A"
    assert best_by_domain(batch(), DRAFTS) == pytest.approx((2 / (1 / 1.5 + 1 / 1.25)) / (2 / (1 / 1.5 + 1)))


def test_with_one_slot_every_prompt_is_answered_alone() -> None:
    assert rates_alone(batch())["sql"]["goodput"] == rates(1.2)
    table = live_table("1", batch(), DRAFTS)
    assert "| tokens/s over those of | maths (A) | sql (B) |" in table
    assert "| goodput over the best draft there | 1.00 [1.00, 1.00] | 0.96 [0.96, 0.96] |" in table
    assert "| goodput over lookup_else_model | 1.25 [1.25, 1.25] | 1.00 [1.00, 1.00] |" in table
    assert "| goodput+ngram over the best draft there | 0.93 [0.93, 0.93] | 0.88 [0.88, 0.88] |" in table


def test_with_more_slots_rounds_of_one_domain_count() -> None:
    alone = {domain: {name: rates(2 * own[place]) for name, own in OVER.items()} for place, domain in enumerate("xy")}
    alone["y"]["A"] = rates(3.0)
    table = live_table("4", batch(alone=alone), DRAFTS)
    assert "| tokens/s over those of | x (A) | y (A) |" in table
    assert "| goodput over the best draft there | 1.00 [1.00, 1.00] | 0.80 [0.80, 0.80] |" in table
    assert "Batch 4: no rounds of one domain alone." in live_table("4", batch(), DRAFTS)
