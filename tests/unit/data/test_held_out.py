"""Split of the held-out prompts into those that choose and those that are quoted."""

from __future__ import annotations

import pytest

from distillspec.data.held_out import split_held_out


@pytest.mark.parametrize(
    ("count", "choosing", "quoted"), [(64, 12, range(12, 64)), (24, 32, range(12, 24)), (3, 32, range(1, 3))]
)
def test_what_chooses_is_never_quoted(count: int, choosing: int, quoted: range) -> None:
    chosen, others = split_held_out(range(count), choosing)
    assert others == list(quoted)
    assert chosen + others == list(range(count))


def test_a_single_prompt_does_both() -> None:
    assert split_held_out(["p"], 4) == (["p"], ["p"])
