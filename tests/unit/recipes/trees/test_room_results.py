"""What the oracle adds, from rates by round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from distillspec.recipes.trees.room_results import GOODPUT, NONE, chain, cut, judge, write_room


def cell(goodput: float = 1.1) -> dict[str, Any]:
    """Return a cell of four rounds in which chains of two are the best fixed ones, and the oracle has 1.3 of them."""
    speed = [100.0, 110.0, 90.0, 105.0]
    times = {NONE: 0.8, chain(1): 0.9, chain(2): 1.0, GOODPUT: goodput, chain(8): 0.65, cut(chain(8)): 1.3}
    return {
        "batch": 1,
        "temperature": 0.0,
        "tokens_per_s": {name: [share * rate for rate in speed] for name, share in times.items()},
        "tokens_per_step": {name: [3.0] * 4 for name in times},
        "depths": {chain(8): 8},
    }


def test_room_is_the_oracles_gain_and_goodput_reaches_a_share_of_it() -> None:
    judged = judge(cell())
    assert judged["best"] == chain(2), "not the long chain, which is there for the oracle to cut"
    assert judged["room"][chain(8)] == pytest.approx((2.0, 2.0, 2.0))
    assert judged["over_best"][cut(chain(8))] == pytest.approx((1.3, 1.3, 1.3))
    assert judged["share"] == pytest.approx(math.log(1.1) / math.log(1.3))
    assert judged["accepted"] == {chain(8): 2 / 8}


def test_rounds_in_which_roundings_led_to_another_text_tell_no_room() -> None:
    other = cell()
    other["tokens_per_step"][cut(chain(8))] = [3.0, 2.9, 3.0, 3.1]
    other["tokens_per_s"][cut(chain(8))][1] = 1000.0
    judged = judge(other)
    assert judged["alike"] == {chain(8): 2}
    assert judged["room"][chain(8)] == pytest.approx((2.0, 2.0, 2.0))
    other["tokens_per_step"][cut(chain(8))] = [2.0] * 4
    assert judge(other)["room"] == {chain(8): None}


def test_a_best_length_of_none_is_a_length_too(tmp_path: Path) -> None:
    slow = cell()
    slow["tokens_per_s"][NONE] = [1.2 * rate for rate in slow["tokens_per_s"][chain(2)]]
    assert judge(slow)["best"] == NONE
    table = write_room([slow], {"rounds": 4}, tmp_path)
    assert "Batch 1, T = 0.0; best fixed length: none" in table
    assert "| chain 8 | 0.25 | 66.6 | 0.54 [0.54, 0.54] | 1.08 [1.08, 1.08] | 2.00 [2.00, 2.00] in 4 |" in table
    assert (tmp_path / "room.png").stat().st_size > 1000
