"""One update: it raises acceptance on its text, keeps to its limits, and never leaves a broken draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distillspec.config import DraftConfig, LossConfig
from distillspec.losses import SignalTeacher, TeacherChunk
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving.online.log.records import ACCEPTED
from distillspec.serving.online.training.examples import training_example_of
from distillspec.serving.online.training.learning import learn
from distillspec.serving.online.training.memory import MemoryFile

from ..conftest import Answer
from .drafts import CONFIG, alpha, fresh, updated


@pytest.mark.parametrize("change", [{}, {"positions": "rejected"}])
def test_an_update_raises_acceptance_on_its_text(
    small_draft: LanguageModel, target: LanguageModel, answer: Answer, change: dict
) -> None:
    answers = [answer(f"r{i}", tokens=40, domain=("maths", "chat")[i % 2]) for i in range(6)]
    ids = torch.tensor([[*a.prompt_ids, *a.response_ids] for a in answers])
    draft, config = fresh(small_draft), replace(CONFIG, **change)
    before = alpha(draft, target, ids)
    result = updated(draft, answers, config)
    assert not result.problem
    assert result.steps == 30
    assert result.loss_at_end < result.loss
    assert result.alpha_at_end > result.alpha > 0
    assert alpha(draft, target, ids) > before + 0.02


def test_without_weight_a_position_teaches_nothing(
    small_draft: LanguageModel, answer: Answer, target: LanguageModel
) -> None:
    """With rejected positions alone, the signal at the others may be anything."""
    one = answer("a", tokens=30)
    spoilt = replace(one, signal=replace(one.signal, ids=one.signal.ids.clone(), logprobs=one.signal.logprobs.clone()))
    accepted = one.outcomes == ACCEPTED
    spoilt.signal.ids[accepted] = (spoilt.signal.ids[accepted] + 1) % 259
    config = replace(CONFIG, positions="rejected", max_steps=3, epochs=3)
    drafts = [fresh(small_draft), fresh(small_draft)]
    for draft, text in zip(drafts, (one, spoilt), strict=True):
        updated(draft, [text], config)
    for a, b in zip(drafts[0].model.parameters(), drafts[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_update_goes_on_where_the_last_one_ended(small_draft: LanguageModel, answer: Answer, tmp_path: Path) -> None:
    """Moments, the learning rate's rise and weights in float32 are kept, though the folder has 16 bits."""
    examples = [training_example_of(answer(f"r{i}", tokens=40), CONFIG) for i in range(6)]
    file, rates = MemoryFile(tmp_path / "optimizer.pt"), list[float]()
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    one, two = fresh(small_draft), fresh(small_draft)
    try:
        learn(one, examples, replace(CONFIG, max_steps=6), LossConfig())
        _, memory = learn(two, examples, replace(CONFIG, max_steps=3), LossConfig())
        assert memory is not None
        file.write("v1", memory)
        rounded = fresh(small_draft)
        with torch.no_grad():
            for own, learnt in zip(rounded.model.parameters(), two.model.parameters(), strict=True):
                own.copy_(learnt.bfloat16())  # as the candidate's folder has them
        assert file.read("v2") is None
        kept = file.read("v1")
        assert kept is not None
        assert kept.steps == 3
        learn(rounded, examples, replace(CONFIG, max_steps=3), LossConfig(), memory=kept)
    finally:
        hook.remove()
    assert torch.equal(kept.weights[name := next(iter(kept.weights))], dict(two.model.named_parameters())[name])
    rise = [CONFIG.learning_rate * step / 10 for step in range(1, 7)]
    assert rates == pytest.approx([*rise, *rise[:3], *rise[3:]])


def test_a_memory_of_other_weights_is_not_used(
    small_draft: LanguageModel, target: LanguageModel, answer: Answer
) -> None:
    examples = [training_example_of(answer("a"), CONFIG)]
    config = replace(CONFIG, max_steps=1)
    _, memory = learn(fresh(small_draft), examples, config, LossConfig())
    assert memory is not None
    larger = initialise_draft(DraftConfig(layers=3), target)
    result, kept = learn(larger, examples, config, LossConfig(), memory=memory)
    assert not result.problem
    assert kept is not None
    assert (memory.steps, kept.steps) == (1, 1)


def test_gradients_are_clipped_before_every_step(small_draft: LanguageModel, answer: Answer) -> None:
    answers = [answer(f"r{i}", tokens=40) for i in range(6)]
    config = replace(CONFIG, max_steps=8, epochs=8)

    def norms(clip_norm: float) -> list[float]:
        """Of the gradients as the optimizer gets them."""
        found: list[float] = []

        def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            gradients = [
                p.grad.flatten() for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            found.append(float(torch.cat(gradients).norm()))

        hook = register_optimizer_step_pre_hook(look)
        try:
            assert updated(fresh(small_draft), answers, replace(config, clip_norm=clip_norm)).steps == len(found)
        finally:
            hook.remove()
        return found

    free = norms(1e9)
    assert len(free) == 8
    limit = min(free[0], free[-1]) / 4
    clipped = norms(limit)
    assert clipped[0] == pytest.approx(limit, rel=1e-3)  # the first gradient is the same in both
    assert max(clipped) <= limit * 1.001
    loose = norms(2 * max(free))
    assert loose == pytest.approx(free)  # what is small enough stays as it is


def test_chunk_tokens_bound_the_positions_whose_logits_exist(
    small_draft: LanguageModel, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    chunk = SignalTeacher.chunk

    def counting(self: SignalTeacher, start: int, stop: int) -> TeacherChunk:
        seen.append(stop - start)
        return chunk(self, start, stop)

    monkeypatch.setattr(SignalTeacher, "chunk", counting)
    config = replace(CONFIG, max_steps=1)
    drafts = [fresh(small_draft), fresh(small_draft)]
    for draft, chunk_tokens in zip(drafts, (None, 7), strict=True):
        seen.clear()
        examples = [training_example_of(answer(f"r{i}", tokens=20), config) for i in range(3)]
        assert learn(draft, examples, config, LossConfig(chunk_tokens=chunk_tokens))[0].steps == 1
        assert max(seen) == (chunk_tokens or 60)
        assert sum(seen) == 60
    for ours, theirs in zip(drafts[0].model.parameters(), drafts[1].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_labels_that_a_truncated_draft_lacks_do_not_dilute_the_loss(target: LanguageModel, answer: Answer) -> None:
    draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=torch.arange(120))
    one = answer("a", tokens=40)
    labels = torch.tensor(one.response_ids)
    assert draft.kept_ids is not None
    known = torch.isin(labels, draft.kept_ids)
    assert 0 < int(known.sum()) < 40
    ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(draft.full_width(draft.logits(ids))[0, 5:-1], -1)
    expected = -logprobs[known].gather(-1, labels[known, None]).mean()
    config = replace(CONFIG, max_steps=1, epochs=1)
    result, _ = learn(draft, [training_example_of(one, config)], config, LossConfig(name="ce"))
    assert result.loss == pytest.approx(float(expected), rel=1e-4)


def test_nan_weights_end_an_update(small_draft: LanguageModel, answer: Answer) -> None:
    draft = fresh(small_draft)
    with torch.no_grad():
        draft.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    result = updated(draft, [answer("a")])
    assert "not finite" in result.problem
    assert result.steps == 0
    assert result.bad_steps == CONFIG.max_bad_steps
