"""LoRA adapters: they alone learn, and are merged into the draft's weights."""

from __future__ import annotations

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving.online.training.adapters import Adapters

from .drafts import fresh


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_is_merged(small_draft: LanguageModel) -> None:
    pytest.importorskip("peft")
    draft = fresh(small_draft)
    was = draft.layers[0].mlp.up_proj.weight.clone()
    adapters = Adapters(draft, 3)
    learning = [name for name, p in draft.model.named_parameters() if p.requires_grad]
    assert learning
    assert all("lora_" in name for name in learning)
    layer = draft.layers[0].mlp.up_proj
    a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    torch.nn.init.normal_(b)
    change = 2 * b @ a  # scaled by alpha / rank = 2
    adapters.merge()
    torch.testing.assert_close(draft.layers[0].mlp.up_proj.weight, was + change, atol=1e-5, rtol=1e-4)
