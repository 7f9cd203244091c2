"""Heads and target that train together: what reaches whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, silu

from distillspec.config import DraftConfig, LossConfig, TrainConfig
from distillspec.losses import ChunkedLoss
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.target_copy import TargetCopy
from distillspec.training.feed import SampleFeed
from distillspec.training.joint import JointModule
from distillspec.types import Sample, TokenBatch

WEIGHT = 0.5
SETTINGS = TrainConfig(max_steps=1, batch_tokens=512, row_tokens=512, unroll_decay=1.0, target_weight=WEIGHT)


def joint_module(target: LanguageModel, sequential: bool = False, noise: float = 0.02) -> JointModule:
    """Two heads and a target that have both left their beginning."""
    draft = initialise_draft(DraftConfig(kind="medusa", positions=2, sequential=sequential), target)
    copy = TargetCopy(target, "new")
    with torch.no_grad():
        for parameter in (*draft.layers.parameters(), *copy.trained.layers.parameters()):
            parameter += noise * torch.randn(parameter.shape)
    return JointModule(draft, copy.trained, LossConfig(name="fkl"), SETTINGS)


def batch_of(samples: list[Sample]) -> TokenBatch:
    bare = [Sample(s.prompt_id, s.domain, s.prompt_ids, s.response_ids) for s in samples]
    return SampleFeed(bare, SETTINGS, 0, seed=0).take()


def loss_of(module: JointModule, batch: TokenBatch, target: LanguageModel, done: float) -> ChunkedLoss:
    module.begin_step(done)
    ones = torch.ones(batch.response_tokens)
    result = module(batch, module.teacher(batch, target), ones, float(batch.response_tokens))
    assert isinstance(result, ChunkedLoss)
    return result


def gradients(module: JointModule) -> dict[str, Tensor | None]:
    """Return the gradients by name, and forget them."""
    found = {name: own.grad for name, own in module.model.named_parameters()}
    module.zero_grad()
    return found


def written_out(module: JointModule, old: LanguageModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """Return the whole loss of one sample by the paper's formulas, and KL(old ‖ new) a token.

    Head k on the target's final state of the token 1 + k before the newest one.
    """
    text = torch.tensor([[*sample.prompt_ids, *sample.response_ids[:-1]]])
    places = torch.arange(text.shape[1])[None]
    states = module.target.hidden(text, places)[0]
    new = torch.log_softmax(module.target.head.logits(states), -1)
    before = torch.log_softmax(old.logits(text), -1)[0]
    newest = torch.arange(len(sample.prompt_ids) - 1, text.shape[1])
    first, second = (layer.down_proj.weight for layer in module.draft.layers)
    total = torch.zeros(())
    for behind, weight, at in ((1, first, newest), (2, second, newest[1:])):
        read = states[at - behind]
        drafted = torch.log_softmax(module.head().logits(read + silu(read @ weight.T)), -1)
        total = total + kl_div(drafted, new[at].detach(), log_target=True, reduction="sum")
    kept = kl_div(new[newest], before[newest], log_target=True, reduction="sum") / len(newest)
    return total / 2 / len(newest) + WEIGHT * kept, kept


def test_loss_and_gradients_are_those_of_the_written_out_formulas(target: LanguageModel, samples: list[Sample]) -> None:
    module = joint_module(target)
    batch = batch_of(samples[:1])
    result = loss_of(module, batch, target, done=1.0)
    result.loss.backward()
    ours = gradients(module)
    expected, kept = written_out(module, target, samples[0])
    expected.backward()
    theirs = gradients(module)
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert float(result.metrics["target_kl"]) == pytest.approx(float(kept.detach()) * batch.response_tokens, rel=1e-4)
    assert float(kept.detach()) > 0.01
    learning = {name for name, value in theirs.items() if value is not None}
    assert any(name.startswith("target.") for name in learning)
    assert learning == {name for name, value in ours.items() if value is not None}
    for name in learning:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("sequential", [False, True])
def test_the_heads_loss_alone_reaches_the_targets_layers_and_nothing_else_of_it(
    target: LanguageModel, samples: list[Sample], sequential: bool
) -> None:
    module = joint_module(target, sequential)
    module.settings = TrainConfig(max_steps=1)
    module.settings.target_weight = 0.0  # no run may have it
    loss_of(module, batch_of(samples[:3]), target, done=1.0).loss.backward()
    reached = {name for name, own in module.target.model.named_parameters() if own.grad is not None and own.grad.any()}
    layers = {name for name, _ in module.target.model.named_parameters() if ".layers." in name}
    assert reached == layers
    assert all(own.grad is not None for own in module.draft.layers.parameters())


def test_in_the_warm_up_the_heads_learn_alone(target: LanguageModel, samples: list[Sample]) -> None:
    module, batch = joint_module(target), batch_of(samples[:3])
    for done, learns in ((0.0, False), (0.19, False), (0.2, True), (1.0, True)):
        loss_of(module, batch, target, done).loss.backward()
        found = gradients(module)
        assert any(value is not None for name, value in found.items() if name.startswith("draft."))
        assert any(value is not None for name, value in found.items() if name.startswith("target.")) == learns


def test_the_target_trains_in_the_mode_it_serves_in(target: LanguageModel) -> None:
    module = joint_module(target)
    module.train()
    assert module.training
    assert module.draft.model.training
    assert not any(part.training for part in module.target.model.modules())


def test_the_old_target_stays_as_it_is(target: LanguageModel, samples: list[Sample]) -> None:
    before = {name: own.clone() for name, own in target.model.named_parameters()}
    module = joint_module(target)
    loss_of(module, batch_of(samples[:3]), target, done=1.0).loss.backward()
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1).step()
    assert all(torch.equal(own, before[name]) for name, own in target.model.named_parameters())
    assert not any(own.requires_grad for own in target.model.parameters())


def test_a_recorded_signal_stands_for_the_old_target(target: LanguageModel, samples: list[Sample]) -> None:
    """Only the old target is recorded: the heads' teacher is the new one, whose pass gives the states anyway."""
    module = joint_module(target)
    recorded = SampleFeed(samples[:3], SETTINGS, 0, seed=0).take()
    assert recorded.signal is not None
    found = []
    for batch in (recorded, batch_of(samples[:3])):
        metrics = loss_of(module, batch, target, done=1.0).metrics
        found.append((float(metrics["alpha"]), float(metrics["loss"]), float(metrics["target_kl"])))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]  # over ten tokens and the rest
    assert found[0][2] == pytest.approx(found[1][2], rel=0.7)
