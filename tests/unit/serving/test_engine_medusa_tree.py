"""The tree of Medusa's heads: ordered by what their run measured on held-out text, else by typical figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.models import LanguageModel
from distillspec.serving import SamplingParams
from distillspec.serving.base.shape import TreeShape

from ..models.state_drafts import state_draft
from .conftest import MakeEngine, plain_answers, prompts, ticks

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MEASURED = ((0.3, 0.28, 0.26), (0.9, 0.01, 0.01))  # many ranks at the first level, one at the second


def drafted(make_engine: MakeEngine, draft: LanguageModel, controller: str) -> set[tuple[int, ...]]:
    """Return the parents of the trees that an engine drafts, and check its answers."""
    asked = prompts(2)
    settings = {"proposer": "draft_model", "tree": "medusa", "speculation_length": 2, "nodes": 6, "compile": False}
    engine = make_engine(draft, controller=controller, **settings)
    engine.clock = ticks()
    assert engine.controller.most_nodes == 6
    seen = set[tuple[int, ...]]()
    engine.observer = lambda rows, logits: seen.update(row.tree.parents for row in rows)
    answers = [output.token_ids for output in engine.generate(asked, GREEDY)]
    assert answers == plain_answers(engine.target, asked, [GREEDY] * 2)
    return seen


def test_measured_ranks_make_the_tree(
    target: LanguageModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    heads = replace(state_draft("medusa", target), rank_acceptance=MEASURED)
    shapes = {TreeShape.of_parents(parents) for parents in drafted(make_engine, heads, "fixed")}
    assert TreeShape(((3,), (1, 1, 1))) in shapes
    assert "records no acceptance by rank" not in caplog.text


def test_without_a_record_the_log_says_so(
    target: LanguageModel, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    heads = state_draft("medusa", target)
    shapes = {TreeShape.of_parents(parents) for parents in drafted(make_engine, heads, "fixed")}
    assert TreeShape(((3,), (2, 1, 0))) in shapes
    assert caplog.text.count("records no acceptance by rank") == 1


def test_goodput_chooses_among_the_measured_best(target: LanguageModel, make_engine: MakeEngine) -> None:
    heads = replace(state_draft("medusa", target), rank_acceptance=MEASURED)
    shapes = [TreeShape.of_parents(parents) for parents in drafted(make_engine, heads, "goodput") if parents]
    assert shapes
    assert all(shape.widths[1:] in ((), (1,)) for shape in shapes)
