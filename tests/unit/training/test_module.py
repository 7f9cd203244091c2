"""The module of draft and loss: what the parts of a draft learn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distillspec.config import EvaluationConfig, LossConfig, TrainConfig
from distillspec.data.collect import score
from distillspec.evaluation import evaluate
from distillspec.models import LanguageModel
from distillspec.signals import SignalRequest
from distillspec.training.feed import SampleFeed
from distillspec.training.module import DistillModule, teacher_view
from distillspec.training.optimizer import choose_trainable
from distillspec.training.state_store import StateStore
from distillspec.training.unrolling import Unrolling
from distillspec.types import Sample, SamplingPolicy

from ..models.state_drafts import state_draft

TRAINED = ("state_input.confidence.weight", "state_input.confidence.bias")


def loss_of(module: DistillModule, samples: list[Sample], target: LanguageModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of all samples in one batch."""
    config = TrainConfig(max_steps=1, batch_tokens=512, row_tokens=512)
    states = StateStore(target, module.draft.state_ids)
    batch = SampleFeed(samples, config, 0, seed=0, states=states).take()
    teacher = teacher_view(module.mix, batch, target, module.kept_ids)
    result = module(batch, teacher, torch.ones(batch.response_tokens), float(batch.response_tokens))
    return result.loss, result.metrics


@pytest.mark.parametrize("loss", ["jsd", "ce"])
def test_a_confidence_head_changes_nothing_that_the_draft_learns(
    target: LanguageModel, samples: list[Sample], loss: str
) -> None:
    drafts = [state_draft(kind, target) for kind in ("block", "confident block")]
    shared = dict(drafts[0].model.named_parameters())
    with torch.no_grad():
        for name, parameter in drafts[1].model.named_parameters():
            if name in shared:
                parameter.copy_(shared[name])
    found = []
    for draft in drafts:
        value, _ = loss_of(DistillModule(draft, LossConfig(name=loss)), samples, target)
        value.backward()
        found.append({name: own.grad for name, own in draft.model.named_parameters()})
    plain, confident = found
    assert {name for name in confident if name not in plain} == set(TRAINED)
    for name, gradient in plain.items():
        if gradient is None:
            assert confident[name] is None
        else:
            torch.testing.assert_close(confident[name], gradient)
    assert all((confident[name] is not None) == (loss == "jsd") for name in TRAINED), "ce knows no acceptance"


def test_a_confidence_head_learns_how_much_is_accepted(target: LanguageModel, samples: list[Sample]) -> None:
    """Cross entropy with a bias is smallest where the mean prediction is the mean acceptance."""
    draft = state_draft("confident block", target)
    module = DistillModule(draft, LossConfig())
    head = [own for name, own in draft.model.named_parameters() if name in TRAINED]
    optimizer = torch.optim.Adam(head, lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        value, metrics = loss_of(module, samples, target)
        value.backward()
        optimizer.step()
    predicted = _mean_prediction(draft, samples, target)
    accepted = torch.stack([metrics["alpha"] / metrics["weight"]])
    assert float(accepted) > 0.05
    torch.testing.assert_close(predicted[None], accepted, atol=0.05, rtol=0)


@torch.no_grad()
def _mean_prediction(draft: LanguageModel, samples: list[Sample], target: LanguageModel) -> Tensor:
    """Mean probability that the first drafted token is accepted, over all response tokens."""
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        places = torch.arange(ids.shape[1])[None]
        states = StateStore(target, draft.state_ids).rows([[sample]], ids.shape[1])
        fed = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        last = draft.last_states(ids, places, draft.state_input.fuse(fed.float()))  # type: ignore[union-attr]
        found.append(draft.predicted_acceptance(last)[0, len(sample.prompt_ids) - 1 : -1])
    return torch.cat(found).mean()


@pytest.mark.parametrize("kind", ["medusa", "confident block"])
def test_a_loss_of_nan_reaches_every_parameter_that_learns(
    target: LanguageModel, samples: list[Sample], kind: str
) -> None:
    """Of several processes the others wait for each gradient."""
    draft = state_draft(kind, target)
    module = DistillModule(draft, LossConfig())
    loss_of(module, samples, target)[0].backward()
    learns = {name for name, own in draft.model.named_parameters() if own.grad is not None}
    draft.model.zero_grad()
    module.zero_grad()
    with torch.no_grad():
        module.head_weight[0, 0] = torch.nan
    value, _ = loss_of(module, samples, target)
    assert value.isnan()
    value.backward()
    assert {name for name, own in draft.model.named_parameters() if own.grad is not None} >= learns


@pytest.mark.parametrize("recorded", [False, True])
def test_alpha_of_training_is_what_the_evaluator_measures_on_the_same_text(
    target: LanguageModel, samples: list[Sample], recorded: bool
) -> None:
    """Tail draws of its own judge what was learnt: the draft fits those that it learnt from."""
    draft = state_draft("eagle", target)
    choose_trainable(draft, train_embeddings=False)
    module = DistillModule(draft, LossConfig(name="fkl"), Unrolling(3, 1.0))
    bare = [replace(sample, signal=None) for sample in samples]
    texts, others = (score(bare, target, SignalRequest("topk", 64, 4), seed) if recorded else bare for seed in range(2))
    optimizer = torch.optim.Adam([own for own in draft.model.parameters() if own.requires_grad], lr=2e-3)
    for _ in range(12):
        optimizer.zero_grad()
        loss_of(module, texts, target)[0].backward()
        optimizer.step()
    with torch.no_grad():
        _, metrics = loss_of(module, others, target)
    trained = [float(metrics[name] / metrics["weight"]) for name in ("alpha", "alpha_2", "alpha_3")]
    config = EvaluationConfig(speculation_length=3, bootstrap_samples=500, measure_cost=False)
    measured = evaluate(draft, target, bare, SamplingPolicy(), config).alpha_by_position
    for own, theirs in zip(trained, measured, strict=True):
        assert theirs.low <= own <= theirs.high
    assert measured[0].mean > 0.3


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_every_drafted_position_has_the_weight_that_was_set(
    target: LanguageModel, samples: list[Sample], kind: str
) -> None:
    """All chains go on, so that the loss of one position alone is that of weights that name no other."""
    draft = state_draft(kind, target)
    count = draft.most_positions or 3

    def loss(weights: list[float]) -> float:
        module = DistillModule(draft, LossConfig(name="tvd"), Unrolling(count, 1.0, weights=tuple(weights)))
        return float(loss_of(module, samples, target)[0].detach())

    first = loss([1.0] + [0.0] * (count - 1))
    both = loss([1.0, 1.0] + [0.0] * (count - 2))
    assert both != pytest.approx(first, rel=1e-3)
    second = 2 * both - first
    assert loss([3.0, 1.0] + [0.0] * (count - 2)) == pytest.approx(0.75 * first + 0.25 * second)


@pytest.mark.parametrize(("kind", "alone"), [("eagle", True), ("block", False), ("medusa", False)])
def test_positions_with_weights_of_their_own_always_train(
    target: LanguageModel, samples: list[Sample], kind: str, alone: bool
) -> None:
    draft = state_draft(kind, target)
    module = DistillModule(draft, LossConfig(), Unrolling(3, 1.0, begins=0.5))
    found = []
    for done in (0.49, 0.5):
        module.begin_step(done)
        _, metrics = loss_of(module, samples, target)
        found.append(1 + sum(name.startswith("alpha_") for name in metrics))
    assert found == [1 if alone else module.positions, module.positions]
