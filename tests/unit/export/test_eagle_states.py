"""Three states or more, ascending, with the draft's own among them: the fusion's columns follow."""

from __future__ import annotations

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.export.eagle_states import engine_states, fusion


@pytest.mark.parametrize(
    ("form", "own", "layers", "expected"),
    [
        ("vllm", (2, 15, 27), 30, [2, 15, 27]),
        ("vllm", (27, 2, 15), 30, [2, 15, 27]),
        ("vllm", (0, 30), 30, [0, 1, 30]),
        ("speculators", (1,), 2, [0, 1, 2]),
        ("sglang", (3,), 4, [1, 2, 3]),
        ("vllm", (4, 1, 0, 2), 4, [0, 1, 2, 4]),
    ],
)
def test_states_are_ascending_and_filled_up_to_three(
    form: str, own: tuple[int, ...], layers: int, expected: list[int]
) -> None:
    assert engine_states(form, own, layers) == expected


@pytest.mark.parametrize(
    ("form", "own", "layers", "message"),
    [
        ("sglang", (1, 2, 3, 4), 8, "holds drafts of 3 states, and this one reads"),
        ("sglang", (0, 2, 4), 8, "cannot hand over state 0 of 8 layers"),
        ("sglang", (2, 4, 8), 8, r"cannot hand over state 8 of 8 layers; .* draft.feature_ids in 1..7"),
        ("sglang", (1,), 3, "needs 3 states, and a target of 3 layers has 2"),
        ("vllm", (1,), 1, "needs 3 states, and a target of 1 layers has 2"),
    ],
)
def test_states_that_no_engine_hands_over_are_refused(
    form: str, own: tuple[int, ...], layers: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_states(form, own, layers)


def test_the_fusion_of_moved_states_is_the_same_map() -> None:
    states = {number: torch.randn(5, 4, dtype=torch.float64) for number in (1, 3, 7)}
    weight = torch.randn(6, 8, dtype=torch.float64)
    own = torch.cat([states[7], states[1]], -1) @ weight.T
    moved = fusion(weight, (7, 1), [1, 3, 7])
    torch.testing.assert_close(torch.cat(list(states.values()), -1) @ moved.T, own)
