"""What a truncated vocabulary learns: ids that the text needs come in, the least needed go, and nothing else moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.config import DraftConfig, LossConfig, TrainConfig
from distillspec.models import LanguageModel, initialise_draft, load_draft, save_draft
from distillspec.models.draft_head import HeadRows, renew_head
from distillspec.models.vocabulary import lasting_ids
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.examples import TrainingExample, training_example_of
from distillspec.serving.online.training.learning import learn
from distillspec.serving.online.training.trainer import OnlineTrainer
from distillspec.serving.online.training.vocabulary import ceilings, needed_counts, renewed_ids
from distillspec.signals import TeacherSignal
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.types import Sample

from ..conftest import Answer
from .conftest import changed, fill
from .drafts import CONFIG, fresh

KEPT = torch.tensor([0, 1, 2, 3, 4])


def counts(**of: float) -> torch.Tensor:
    found = torch.zeros(12, dtype=torch.float64)
    for name, count in of.items():
        found[int(name[1:])] = count
    return found


@pytest.mark.parametrize(
    ("needed", "most", "expected"),
    [
        ({"i7": 3.0, "i9": 0.4}, 8, [0, 1, 2, 3, 4, 7]),  # what is expected less than half a time stays out
        ({"i7": 3.0, "i8": 5.0, "i9": 4.0}, 7, [0, 1, 2, 3, 7, 8, 9]),  # the most needed first
        ({"i7": 3.0, "i2": 9.0, "i3": 1.0}, 5, [0, 1, 2, 3, 7]),  # for the least needed that may go
        ({"i7": 3.0, "i2": 4.0, "i3": 5.0, "i4": 6.0}, 5, [0, 1, 2, 3, 4]),  # nothing is needed less
        ({"i7": 3.0, "i8": 2.0, "i2": 2.5, "i3": 9.0, "i4": 9.0}, 5, [0, 1, 3, 4, 7]),  # one of two
        ({"i7": 3.0}, 2, [0, 1, 2, 3, 7]),  # a vocabulary above the limit stays as large
        ({f"i{i}": 2.0 for i in range(5, 12)}, 5, [0, 1, 5, 6, 7]),  # all that may go
        ({}, 8, [0, 1, 2, 3, 4]),
    ],
)
def test_which_ids_come_and_go(needed: dict[str, float], most: int, expected: list[int]) -> None:
    assert renewed_ids(KEPT, counts(**needed), most, fixed=[0, 1]).tolist() == expected


def sample(ids: list[list[int]], probs: list[list[float]], domain: str = "sql") -> Sample:
    rows = torch.tensor(probs)
    signal = TeacherSignal("topk", torch.tensor(ids, dtype=torch.int32), rows.log().half(), 1 - rows.sum(-1))
    return Sample("p", domain, (11, 11), tuple(row[0] for row in ids), signal)


def test_counts_are_of_answers_and_weighted_by_tenant() -> None:
    two = [[5, 6], [5, -1]], [[0.75, 0.25], [0.5, 0.0]]  # a redacted id counts for nothing
    one = TrainingExample(sample(*two), torch.ones(2))
    found = needed_counts([one, replace(one, scale=0.5)], 12)
    assert found.nonzero().flatten().tolist() == [5, 6]
    assert found[5] == pytest.approx(1.25 * 1.5, rel=1e-3)
    assert found[6] == pytest.approx(0.25 * 1.5, rel=1e-3)


def test_a_ceiling_is_what_the_kept_ids_can_reach() -> None:
    examples = [
        TrainingExample(sample([[5, 6], [6, 7]], [[0.5, 0.25], [0.5, 0.5]]), torch.ones(2)),
        TrainingExample(sample([[8, 9]], [[0.5, 0.25]], "chat"), torch.ones(1)),
    ]
    assert ceilings(examples, torch.tensor([5, 6])) == pytest.approx({"sql": 0.625, "chat": 0.0}, rel=1e-3)
    assert ceilings(examples, None) == pytest.approx({"sql": 1.0, "chat": 1.0}, rel=1e-3)


def optimizer_of(draft: LanguageModel) -> torch.optim.Optimizer:
    choose_trainable(draft, train_embeddings=False)
    return make_optimizer(DistillModule(draft, LossConfig()), TrainConfig(max_steps=1))


def test_what_an_optimizer_knows_of_a_row_follows_the_row(target: LanguageModel, answer: Answer) -> None:
    before, after = torch.arange(0, 250, 2), torch.arange(0, 250, 3)
    draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=before)
    examples = [training_example_of(answer(f"r{i}", tokens=40), CONFIG) for i in range(3)]
    _, memory = learn(fresh(draft), examples, replace(CONFIG, max_steps=3), LossConfig())
    assert memory is not None
    rows = HeadRows.between(before, after)
    renewed = renew_head(fresh(draft), after, target)
    unknown = renewed.model.get_output_embeddings().weight.detach().clone()
    optimizer = optimizer_of(renewed)
    assert replace(memory, rows=rows).restore(optimizer, renewed.model)

    plain = fresh(draft)
    old = optimizer_of(plain)
    assert memory.restore(old, plain.model)
    stay, come = rows.old_rows >= 0, rows.old_rows < 0
    assert stay.any()
    assert come.any()
    known = dict(plain.model.named_parameters())
    for name, own in renewed.model.named_parameters():
        if not own.requires_grad:
            continue
        theirs, state, was = known[name], optimizer.state[own], old.state[known[name]]
        assert torch.equal(state["step"], was["step"])
        if own is not renewed.model.get_output_embeddings().weight:
            assert torch.equal(own, theirs)
            assert torch.equal(state["exp_avg"], was["exp_avg"])
            continue
        assert torch.equal(own[stay], theirs[rows.old_rows[stay]])
        assert torch.equal(own[come], unknown[come]), "the target's"
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[moment][stay], was[moment][rows.old_rows[stay]])
            assert not state[moment][come].any()


@pytest.mark.parametrize(("most", "size"), [(None, 40), (60, 60), (40, 40), (1000, None)])
def test_an_update_lets_in_what_its_text_needs(
    settings: OnlineSettings,
    target: LanguageModel,
    replay: ReplayLog,
    answer: Answer,
    most: int | None,
    size: int | None,
) -> None:
    kept = torch.arange(40)
    draft = initialise_draft(DraftConfig(kind="eagle"), target, kept_ids=kept)
    registry = VersionRegistry(settings.layout.versions)
    registry.promote(registry.add(lambda folder: save_draft(draft, folder, target)).name, "first draft")
    fill(replay, answer, 8, domain="sql", vocabulary=range(100, 200))
    trainer = OnlineTrainer(changed(settings, vocabulary=most))
    first = trainer.update("by hand")
    assert first is not None
    learnt = load_draft(first.path, target)
    assert learnt.kept_ids is not None
    special = lasting_ids(draft.text_tokenizer, target.stop_ids, target.identity.vocab_size)
    assert set(special) & set(kept.tolist()) <= set(learnt.kept_ids.tolist())
    if size is not None:
        assert learnt.width == size
    assert first.metrics["new_ids"] == int((~torch.isin(learnt.kept_ids, kept)).sum())
    assert (first.metrics["new_ids"] > 0) == (most is not None)
    again = [training_example_of(logged, CONFIG) for logged in replay.load(replay.entries())]
    before, after = ceilings(again, kept)["sql"], ceilings(again, learnt.kept_ids)["sql"]
    assert first.metrics["ceiling"]["sql"] == pytest.approx(after)
    assert (after > before) == (most is not None)

    fill(replay, answer, 8, 8, domain="sql", vocabulary=range(200, 250))
    second = trainer.update("by hand")  # goes on from the memory of the first
    assert second is not None
    assert second.parent == first.name
    assert (second.metrics["new_ids"] > 0) == (most is not None)
