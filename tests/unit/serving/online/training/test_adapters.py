"""LoRA adapters by domain: apart while they learn, merged by their shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving.online.training.adapters import Adapters

from ..conftest import Answer
from .drafts import CONFIG, fresh, updated


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
        updated(draft, text, config)
        drafts.append(draft)
    first, second = ({n: p for n, p in d.model.named_parameters() if "lora_B" in n} for d in drafts)
    # In order of their names: chat is a0, maths a1, and only chat's text was another.
    assert all(torch.equal(first[n], second[n]) for n in first if "a1" in n)
    assert not any(torch.equal(first[n], second[n]) for n in first if "a0" in n)
    merge(kept[0])
