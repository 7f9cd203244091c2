"""One update: it learns what is asked for, from whom it may, and never leaves a broken draft."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distillspec.config import AdaptConfig, LossConfig
from distillspec.models import LanguageModel
from distillspec.serving.online.adapters import Adapters
from distillspec.serving.online.drift import SETTLED, DriftDetector
from distillspec.serving.online.fairness import LEAST
from distillspec.serving.online.learning import Learnt, _in_turn, learn, lesson_of
from distillspec.serving.online.records import ACCEPTED, BONUS, PLAIN, REJECTED
from distillspec.serving.online.replay_log import Entry
from distillspec.serving.online.selection import Selection, newest_that_fit, select

from .conftest import Answer

CONFIG = AdaptConfig(max_steps=30, epochs=30, learning_rate=2e-3, batch_tokens=256, row_tokens=256)


def fresh(draft: LanguageModel) -> LanguageModel:
    return replace(draft, model=copy.deepcopy(draft.model))


def alpha(draft: LanguageModel, target: LanguageModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        p, q = (torch.softmax(m.logits(ids).float(), -1) for m in (target, draft))
    return float(torch.minimum(p, q).sum(-1).mean())


def taught(draft: LanguageModel, answers: list, config: AdaptConfig = CONFIG, **extra: object) -> Learnt:
    return learn(draft, [lesson_of(a, config) for a in answers], config, LossConfig(), **extra)  # type: ignore[arg-type]


def test_positions_count_as_configured(answer: Answer) -> None:
    outcomes = torch.tensor([ACCEPTED, REJECTED, BONUS, PLAIN], dtype=torch.uint8)
    one = answer("a", tokens=4, outcomes=outcomes)
    weights = {
        kind: lesson_of(one, AdaptConfig(positions=kind, accepted_weight=0.25)).weights.tolist()
        for kind in ("all", "rejected", "weighted")
    }
    assert weights == {"all": [1, 1, 1, 1], "rejected": [0, 1, 0, 1], "weighted": [0.25, 1, 1, 1]}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers so
@pytest.mark.parametrize(
    "change", [{}, {"positions": "rejected"}, {"lora_rank": 4}, {"lora_rank": 4, "lora_by": "domain"}]
)
def test_an_update_raises_acceptance_where_it_learnt(
    small_draft: LanguageModel, target: LanguageModel, answer: Answer, change: dict
) -> None:
    if "lora_rank" in change:
        pytest.importorskip("peft")
    answers = [answer(f"r{i}", tokens=40, domain=("maths", "chat")[i % 2]) for i in range(6)]
    ids = torch.tensor([[*a.prompt_ids, *a.response_ids] for a in answers])
    draft, config = fresh(small_draft), replace(CONFIG, **change)
    before = alpha(draft, target, ids)
    names = [name for name, _ in draft.model.named_parameters()]
    learnt = taught(draft, answers, config)
    assert not learnt.problem
    assert learnt.steps == 30
    assert learnt.loss_at_end < learnt.loss
    assert learnt.alpha_at_end > learnt.alpha > 0
    assert alpha(draft, target, ids) > before + 0.02
    assert [name for name, _ in draft.model.named_parameters()] == names  # adapters are merged


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_domains_adapters_are_merged_by_their_shares(small_draft: LanguageModel) -> None:
    pytest.importorskip("peft")
    draft, rank, shares = fresh(small_draft), 3, {"maths": 0.75, "chat": 0.25}
    was = draft.layers[0].mlp.up_proj.weight.clone()
    adapters = Adapters(draft, rank, shares)
    layer = draft.layers[0].mlp.up_proj
    changes = []
    for place, share in enumerate(shares.values()):
        a, b = (getattr(layer, name)[f"a{place}"].weight for name in ("lora_A", "lora_B"))
        torch.nn.init.normal_(b)
        changes.append(share * 2 * b @ a)  # scaled by alpha / rank = 2
    adapters.merge()
    merged = draft.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(merged, was + sum(changes), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_domains_adapter_learns_from_its_own_text_alone(
    small_draft: LanguageModel, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    config = replace(CONFIG, lora_rank=2, lora_by="domain", max_steps=6, epochs=3)
    answers = [answer(f"r{i}", domain=("maths", "chat")[i % 2]) for i in range(6)]
    kept: list[Adapters] = []
    merge = Adapters.merge
    monkeypatch.setattr(Adapters, "merge", lambda self: kept.append(self))
    drafts = []
    for text in (answers, [a for a in answers if a.domain == "maths"] + [answer("other", domain="chat")]):
        torch.manual_seed(0)  # adapters begin at random
        draft = fresh(small_draft)
        taught(draft, text, config)
        drafts.append(draft)
    first, second = ({n: p for n, p in d.model.named_parameters() if "lora_B" in n} for d in drafts)
    # In order of their names: chat is a0, maths a1, and only chat's text was another.
    assert all(torch.equal(first[n], second[n]) for n in first if "a1" in n)
    assert not any(torch.equal(first[n], second[n]) for n in first if "a0" in n)
    merge(kept[0])


def test_without_weight_a_position_teaches_nothing(
    small_draft: LanguageModel, answer: Answer, target: LanguageModel
) -> None:
    """Rejected positions alone: what stands at the others may be anything."""
    one = answer("a", tokens=30)
    spoilt = replace(one, signal=replace(one.signal, ids=one.signal.ids.clone(), logprobs=one.signal.logprobs.clone()))
    accepted = one.outcomes == ACCEPTED
    spoilt.signal.ids[accepted] = (spoilt.signal.ids[accepted] + 1) % 259
    config = replace(CONFIG, positions="rejected", max_steps=3, epochs=3)
    drafts = [fresh(small_draft), fresh(small_draft)]
    for draft, taught_by in zip(drafts, (one, spoilt), strict=True):
        taught(draft, [taught_by], config)
    for a, b in zip(drafts[0].model.parameters(), drafts[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_anchor_keeps_the_draft_near_the_promoted_one(small_draft: LanguageModel, answer: Answer) -> None:
    answers = [answer(f"r{i}", tokens=40) for i in range(4)]
    moved = []
    for weight in (0.0, 20.0):
        draft = fresh(small_draft)
        anchor = small_draft if weight else None
        taught(draft, answers, replace(CONFIG, anchor=weight), anchor=anchor)
        ids = torch.tensor([answers[0].prompt_ids + answers[0].response_ids])
        with torch.no_grad():
            was, now = (torch.log_softmax(m.logits(ids), -1) for m in (small_draft, draft))
        moved.append(float((was.exp() * (was - now)).sum(-1).mean()))
    assert moved[1] < 0.5 * moved[0]


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
            assert taught(fresh(small_draft), answers, replace(config, clip_norm=clip_norm)).steps == len(found)
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


def test_numbers_that_are_none_end_an_update(small_draft: LanguageModel, answer: Answer) -> None:
    draft = fresh(small_draft)
    with torch.no_grad():
        draft.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    learnt = taught(draft, [answer("a")])
    assert "not finite" in learnt.problem
    assert learnt.steps == 0
    assert learnt.bad_steps == CONFIG.max_bad_steps


def entry(number: int, tenant: str, tokens: int = 10) -> Entry:
    return Entry(number, 1, 0, f"r{number}", tenant, "d", "train", tokens, 5, 2, 0.0)


def counts_for(chosen: Selection, tenant: str) -> float:
    """A tenant's part of an update, by weight."""
    weighed = [(e.tenant, e.tokens * chosen.weights[e.tenant]) for e in (*chosen.new, *chosen.old)]
    return sum(tokens for name, tokens in weighed if name == tenant) / sum(tokens for _, tokens in weighed)


def test_no_tenant_counts_for_more_than_its_share() -> None:
    entries = [entry(i, "flood" if i % 10 else f"t{i % 30}") for i in range(300)]
    config = AdaptConfig(tenant_share=0.4)
    flooded = select(entries[200:], entries[:200], [], config, seed=0)
    assert counts_for(flooded, "flood") <= 0.4 + 1e-6
    assert flooded.new == entries[200:]  # nobody's text is left out
    assert flooded.capped == 90
    assert {tenant: weight for tenant, weight in flooded.weights.items() if tenant != "flood"} == {
        f"t{i}": 1.0 for i in (0, 10, 20)
    }
    alone = select([entry(i, "only") for i in range(5)], [], [], config, seed=0)
    assert (alone.weights, alone.capped) == ({"only": 1.0}, 0)
    both = select([entry(i, "ab"[i > 90]) for i in range(100)], [], [], AdaptConfig(tenant_share=0.2), seed=0)
    assert counts_for(both, "a") == pytest.approx(0.5)


def test_a_small_tenant_does_not_silence_a_large_one() -> None:
    """5 requests of one, 507 of another; and a single request by an administrator's key."""
    for few in (5, 1):
        chosen = select([entry(i, "small" if i < few else "large") for i in range(512)], [], [], AdaptConfig(), seed=0)
        assert len(chosen.new) == 512
        assert chosen.weights == {"small": 1.0, "large": LEAST}
        assert counts_for(chosen, "large") > 0.8
        whole = AdaptConfig(max_steps=1, batch_tokens=5120, row_tokens=5120)  # all of it fits
        assert len(newest_that_fit(chosen.new, whole.max_steps * whole.batch_tokens)) == 512
        short = newest_that_fit(chosen.new, 1000)
        assert [e.tenant for e in short] == ["small"] * few + ["large"] * (100 - few)
        assert short[-1].number == 511


def test_a_weight_holds_for_batches_of_one_tenant_alone(small_draft: LanguageModel, answer: Answer) -> None:
    """Long answers fill batches of their own."""
    config = replace(CONFIG, epochs=1, max_steps=50, batch_tokens=64, row_tokens=64, clip_norm=1e9)
    lessons = [lesson_of(answer(f"r{i}", tokens=50), config, 0.1 if i < 4 else 1.0) for i in range(6)]
    mean = (4 * 0.1 + 2 * 1.0) / 6
    normalised = []
    for _, weights, normalizer in _in_turn([lessons], config, small_draft, 0):
        normalised.append(round(float(weights.sum()) / normalizer, 4))
    assert sorted(normalised) == sorted([round(0.1 / mean, 4)] * 4 + [round(1 / mean, 4)] * 2)
    plain = [lesson_of(answer(f"r{i}", tokens=50), config) for i in range(6)]
    assert all(
        float(weights.sum()) == normalizer for _, weights, normalizer in _in_turn([plain], config, small_draft, 0)
    )


@pytest.mark.parametrize(("epochs", "rising"), [(1, 1), (3, 3), (20, 10)])
def test_the_rate_is_full_for_at_least_half_of_a_short_update(
    small_draft: LanguageModel, answer: Answer, epochs: int, rising: int
) -> None:
    config = replace(CONFIG, epochs=epochs, max_steps=50, batch_tokens=64, row_tokens=64)
    lessons = [lesson_of(answer(f"r{i}", tokens=50), config) for i in range(2)]
    rates: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        steps = learn(fresh(small_draft), lessons, config, LossConfig()).steps
    finally:
        hook.remove()
    assert steps == 2 * epochs
    assert [rate < config.learning_rate for rate in rates].count(True) == rising - 1


def test_an_update_mixes_new_and_old_and_flush_mode_does_not() -> None:
    new, old = [entry(i, "t") for i in range(100, 170)], [entry(i, "t") for i in range(100)]
    chosen = select(new, old, [], AdaptConfig(replay_share=0.3), seed=0)
    assert (len(chosen.new), len(chosen.old)) == (70, 30)
    assert select(new, old, [], AdaptConfig(mode="flush"), seed=0).old == []


def test_drift_is_a_fall_of_the_short_average() -> None:
    detector = DriftDetector(0.1)
    assert not any(detector.add("code", 10, 7) for _ in range(5 * SETTLED))
    fallen = [detector.add("chat", 10, 3) for _ in range(40)]
    assert any(fallen)  # the whole falls, though chat is new
    detector.restart()
    assert not any(detector.add("chat", 10, 3) for _ in range(100))
    assert not detector.add("chat", 0, 0)
