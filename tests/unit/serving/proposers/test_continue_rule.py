"""Rules that stop a draft: by its best probability, or by the acceptance that it predicts. Exact in both cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.models.stop_head import StopHead
from distillspec.serving import Engine
from distillspec.serving.proposers.continue_rule import ConfidenceThreshold, PredictedAcceptance

from ..conftest import MakeEngine, prompts
from ..test_engine_grown_trees import MIXED, tree_draft
from ..test_engine_sampling import POLICIES, excess


def taught(draft: LanguageModel, reads: str) -> LanguageModel:
    """Return the draft with a network whose predictions differ from place to place."""
    torch.manual_seed(4)
    head = StopHead(reads, draft.model.get_output_embeddings().weight.shape[1], 16, draft.width)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(4)
    return replace(draft, stop_head=head.eval())


def depths_of(engine: Engine) -> set[int]:
    found: set[int] = set()
    engine.observer = lambda emissions, logits: found.update(e.tree.depth for e in emissions)
    engine.generate(prompts(), MIXED)
    return found


def test_the_best_probability_decides() -> None:
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    assert ConfidenceThreshold(0.6).keeps(logits, torch.zeros(2, 4)) == [False, True]


@pytest.mark.parametrize("reads", ["probs", "state"])
def test_predicted_acceptance_decides(draft: LanguageModel, reads: str) -> None:
    own = taught(draft, reads)
    assert own.stop_head is not None
    logits, states = torch.randn(6, own.width), torch.randn(6, own.stop_head.size)
    predicted = own.stop_head.acceptance(states, logits)
    threshold = float(predicted.median())
    assert PredictedAcceptance(own, own.stop_head, threshold).keeps(logits, states) == (predicted > threshold).tolist()


@pytest.mark.parametrize("reads", ["probs", "state"])
@pytest.mark.parametrize("kind", ["truncated", "eagle"])
def test_answers_follow_the_target_where_drafts_stop_by_prediction(
    target: LanguageModel, make_engine: MakeEngine, kind: str, reads: str
) -> None:
    draft = taught(tree_draft(kind, target), reads)
    engine = make_engine(draft, draft_confidence=0.5, speculation_length=3, max_slots=64)
    assert len(depths_of(engine) - {0}) > 1, "some stop early, some do not"
    assert float(excess(engine, target, POLICIES["plain"]).max()) < 5
