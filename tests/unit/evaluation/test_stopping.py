"""Examples that teach a `StopHead`, and its judgement."""

from __future__ import annotations

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.evaluation import TargetStates
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.stopping import stop_examples, stop_quality
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.stop_head import StopExamples, StopHead
from distillspec.types import Sample, SamplingPolicy

POLICY = SamplingPolicy(temperature=1.0)


def samples() -> list[Sample]:
    texts = [([5, 6, 7], [8, 9, 10, 11]), ([20, 21], [22, 23, 24])]
    return [
        Sample(str(n), "default", tuple(prompt), tuple(answer), None, "teacher", True)
        for n, (prompt, answer) in enumerate(texts)
    ]


@pytest.mark.parametrize(("kind", "depths"), [("tokens", 1), ("eagle", 3)])
def test_every_token_is_an_example_at_each_depth(target: LanguageModel, kind: str, depths: int) -> None:
    config = DraftConfig(layers=2) if kind == "tokens" else DraftConfig(kind="eagle", feature_ids=[1, 3])
    draft = initialise_draft(config, target)
    head, done = StopHead("probs", 64, 8, draft.width), list[int]()
    found = stop_examples(head, draft, TargetStates(target), samples(), POLICY, 3, done.append)
    assert done == [1, 2]
    assert len(found) == 7 * depths
    measured = [measure_positions(draft, target, sample, POLICY, speculation_length=3) for sample in samples()]
    alpha = torch.cat([each.at(depth).alpha for each in measured for depth in range(depths)])
    assert torch.allclose(found.alpha.double(), alpha, atol=1e-6)
    assert torch.equal(found.inputs[:, 0], found.best), "the best probability comes first"


def test_quality_is_beside_what_needs_no_training() -> None:
    alpha = torch.tensor([0.2, 0.8, 0.2, 0.8])
    head = StopHead("state", 2, 4, 3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    found = stop_quality(head.eval(), StopExamples(torch.randn(4, 2), torch.full((4,), 0.9), alpha))
    assert (found.places, found.mean) == (4, pytest.approx(0.5))
    assert found.error == pytest.approx(0.09)  # it says 0.5 everywhere
    assert found.by_mean == pytest.approx(0.09)
    assert found.by_best == pytest.approx((0.49 + 0.01) / 2)
    assert found.calibration == pytest.approx(0.0, abs=1e-6)
