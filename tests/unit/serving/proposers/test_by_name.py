"""The proposers that an engine has by default, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distillspec.config import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, save_draft
from distillspec.serving.base.fixed import FixedLength, FixedTree
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import DRAFT, NGRAM, TokenTree
from distillspec.serving.engine import Engine
from distillspec.serving.proposers.base import Proposer
from distillspec.serving.proposers.by_name import draft_models, use_trees
from distillspec.serving.proposers.draft_model import DraftModel
from distillspec.serving.proposers.side_by_side import SideBySide

from ..conftest import MakeEngine, prompts

GOODPUT: dict[str, Any] = {"controller": "goodput", "measure_costs_s": 0}


def sources(proposer: Proposer | None) -> list[str]:
    if isinstance(proposer, SideBySide):
        return list(proposer.proposers)
    return [DRAFT] if isinstance(proposer, DraftModel) else []


def test_ngrams_stand_beside_an_only_draft_where_goodput_plans_each_request(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    assert sources(make_engine(draft, **GOODPUT).proposer) == [NGRAM, DRAFT]
    assert sources(make_engine(draft, lengths="step", **GOODPUT).proposer) == [DRAFT]
    assert sources(make_engine(draft, controller="fixed").proposer) == [DRAFT]
    assert sources(make_engine(draft, proposer="draft_model", **GOODPUT).proposer) == [DRAFT]
    assert make_engine(None, **GOODPUT).proposer is None


def test_of_several_drafts_no_ngrams_stand_beside(target: LanguageModel, draft: LanguageModel) -> None:
    settings = EngineConfig(max_slots=2, max_model_len=64, measure_costs_s=0)
    engine = Engine(target, {"one": draft, "two": draft}, settings)
    assert sources(engine.proposer) == ["one", "two"]
    engine.close()


@pytest.mark.parametrize("later", [False, True])
def test_a_controller_of_the_callers_plans_for_the_draft_alone(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, tmp_path: Path, later: bool
) -> None:
    save_draft(draft, tmp_path / "draft", target)
    engine = make_engine(None if later else draft, controller_object=FixedLength(2), **GOODPUT)
    if later:
        engine.load_draft(tmp_path / "draft")
        engine.step()
    assert sources(engine.proposer) == [DRAFT]


def test_an_engines_draft_grows_other_trees_from_the_next_step_on(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    """What is drawn becomes what is most probable, then the most confident nodes, and is drawn again."""
    engine = make_engine(draft, controller_object=FixedTree(TreeShape.full((2, 2))), speculation_length=2, seed=5)
    trees: list[TokenTree] = []
    engine.observer = lambda seen, logits: trees.extend(emission.tree for emission in seen if emission.tree.tokens)

    def grown(**settings: Any) -> tuple[set[str], int]:
        trees.clear()
        use_trees(engine.proposer, EngineConfig(**settings))
        engine.generate(prompts(3), SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True))
        whole = max(len(tree.groups[0].nodes) for tree in trees)
        return {group.kind for tree in trees for group in tree.groups}, whole

    assert grown() == ({"drawn"}, 2)
    assert grown(tree="topk") == ({"deterministic"}, 2)
    kinds, children = grown(tree="dynamic", widths=[3])
    assert kinds == {"deterministic"}
    assert children == 3, "the widths are those of the settings, and the number of nodes the shape's"
    assert max(map(len, trees)) == 6
    assert grown(tree="fork", widths=[2]) == ({"drawn"}, 2)


def test_combinations_of_heads_need_heads(draft: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine(draft)
    with pytest.raises(ConfigError, match="tree=medusa needs a draft of kind medusa, not pruned"):
        use_trees(engine.proposer, EngineConfig(tree="medusa"))
    (model,) = draft_models(engine.proposer)
    assert not model.trees.most_probable
    use_trees(None, EngineConfig(tree="medusa"))
    assert draft_models(None) == []
