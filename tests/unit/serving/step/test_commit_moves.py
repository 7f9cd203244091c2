"""Accepted nodes of all rows move in one call a step, and the cache holds what a pass over the text would write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.models import initialise_draft
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_model
from distillspec.serving import Request, SamplingParams
from distillspec.serving.execution.row_input import RowInput

from ..conftest import MakeEngine

TREE = {"tree": "topk", "widths": [3, 2], "speculation_length": 2, "proposer": "draft_model", "compile": False}
STEPS = 12


@pytest.mark.parametrize("page_tokens", [0, 4])
def test_the_cache_holds_what_a_pass_over_the_text_writes(page_tokens: int, make_engine: MakeEngine) -> None:
    """Of eight ids drafted tokens are often accepted, and those of a second branch have to move."""
    target = wrap(tiny_model(8, layers=2).double(), None, "eight ids")
    draft = initialise_draft(DraftConfig(layers=2), target)
    engine = make_engine(draft, model=target, **TREE, **({"page_tokens": page_tokens} if page_tokens else {}))
    cache, moved = engine.runner.cache, list[Tensor]()
    plain = cache.gather

    def note(moves: Tensor) -> None:
        moved.append(moves)
        plain(moves)

    cache.gather = note  # type: ignore[method-assign]
    params = SamplingParams(temperature=2.0, max_tokens=90, ignore_eos=True)
    for row in range(4):
        engine.submit(Request(str(row), (row, 7, 3), params))
    while len(engine.sequences.decoding) < 4:
        engine.step()
    moved.clear()
    for step in range(STEPS):
        engine.step()
        assert len(moved) <= 1 + step, "one call a step"
    assert max(len(set(moves[0].tolist())) for moves in moved) > 1, "of several rows"
    for sequence in engine.sequences.decoding:
        fresh = make_engine(None, model=target, compile=False)
        with torch.inference_mode():
            fresh.runner.read([RowInput(0, 0, sequence.tokens[: sequence.computed], 0)])
        pairs = zip(cache.tensors(), fresh.runner.cache.tensors(), strict=True)
        for ours, other in pairs:
            text = cache.text(ours, sequence.held_slot, sequence.computed)
            torch.testing.assert_close(text, other[0, :, : sequence.computed], atol=1e-10, rtol=1e-9)
