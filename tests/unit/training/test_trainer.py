"""The training loop: it learns, keeps the best draft, and ends at its limits."""

from __future__ import annotations

import pytest
import torch

from distillspec.config import DraftConfig, LossConfig
from distillspec.models import LanguageModel, initialise_draft, load_draft
from distillspec.types import Sample

from .runs import metrics, weights


@pytest.mark.parametrize("loss", ["fkl", "tvd", "ce"])
def test_the_loss_falls_on_a_few_samples(make_trainer, loss: str) -> None:
    train = {"max_steps": 25, "eval_every": 25, "learning_rate": 5e-3, "schedule": "constant"}
    trainer = make_trainer(loss=LossConfig(name=loss), train=train)
    result = trainer.run()
    assert result.stopped_by == "steps"
    losses = [line["train/loss"] for line in metrics(trainer.folder) if "train/loss" in line]
    assert len(losses) == 25
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_acceptance_rises_and_the_best_draft_is_kept(make_trainer, target: LanguageModel) -> None:
    alphas = iter([0.1, 0.7, 0.3, 0.2])
    trainer = make_trainer(evaluate=lambda model: {"eval/alpha": next(alphas)}, train={"eval_every": 2, "max_steps": 8})
    states: dict[int, torch.Tensor] = {}
    trainer.report = lambda progress, values: states.setdefault(
        progress.step, weights(trainer)["lm_head.weight"].clone()
    )
    result = trainer.run()
    assert result.best == {"step": 4, "alpha": 0.7}
    kept = load_draft(trainer.folder / "best", target)
    assert torch.equal(kept.model.lm_head.weight, states[4].bfloat16().float())  # as drafts are served
    assert not torch.equal(kept.model.lm_head.weight, states[4])
    assert not torch.equal(states[4], states[8])


def test_frozen_embeddings_stay_and_the_rest_moves(make_trainer, target: LanguageModel) -> None:
    trainer = make_trainer()
    trainer.run()
    start = initialise_draft(DraftConfig(keep=[0, 3]), target).model.state_dict()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, start[name])}
    assert moved == set(start) - {"model.embed_tokens.weight"}


def test_a_head_tied_to_the_embeddings_learns(make_trainer, random_model) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), random_model("gemma2"))
    start = draft.model.lm_head.weight.detach().clone()
    make_trainer(draft=draft).run()
    assert draft.model.lm_head.weight is draft.model.get_input_embeddings().weight
    assert not torch.equal(draft.model.lm_head.weight, start)


def test_selection_trains_on_a_share_of_the_tokens(make_trainer, target: LanguageModel, samples: list[Sample]) -> None:
    reference = initialise_draft(DraftConfig(keep=[0, 1, 3]), target)
    loss = LossConfig(select_fraction=0.25, reference="given")
    bare = [Sample(s.prompt_id, s.domain, s.prompt_ids, s.response_ids) for s in samples]
    trainer = make_trainer(loss=loss, reference=reference, samples_=bare)
    batch = trainer.feed.take()
    chosen = trainer.weighted(batch).weights
    assert set(chosen.tolist()) == {0.0, 1.0}
    assert float(chosen.sum()) == pytest.approx(0.25 * batch.response_tokens, abs=1)
    before = weights(trainer)["lm_head.weight"].clone()
    trainer.run()
    assert not torch.equal(weights(trainer)["lm_head.weight"], before)


@pytest.mark.parametrize(("loss", "signal", "forwards"), [("ce", False, 0), ("fkl", False, 3), ("fkl", True, 0)])
def test_the_teacher_runs_only_where_it_is_needed(
    make_trainer, target: LanguageModel, samples: list[Sample], loss: str, signal: bool, forwards: int
) -> None:
    bare = [Sample(s.prompt_id, s.domain, s.prompt_ids, s.response_ids) for s in samples]
    trainer = make_trainer(
        loss=LossConfig(name=loss),
        samples_=samples if signal else bare,
        train={"max_steps": 3},
        evaluate=lambda model: {"eval/alpha": 0.5},
    )
    calls: list[int] = []
    hook = target.decoder.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        trainer.run()
    finally:
        hook.remove()
    assert len(calls) == forwards


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"max_tokens": 70}, "tokens"), ({"max_minutes": 1e-6}, "minutes"), ({"max_steps": 2}, "steps")],
)
def test_a_run_ends_at_the_first_limit_it_meets(make_trainer, limit: dict[str, float], reason: str) -> None:
    trainer = make_trainer(train={"max_steps": 50, **limit})
    assert trainer.run().stopped_by == reason
    assert trainer.progress.step <= 3
